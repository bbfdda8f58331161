// Modal dialogs: the browser keeps the focus inside, closes them with Escape, and returns the focus.
import { $, make } from "./core.js";

export function openDialog(id) {
  if (!$(id).open) $(id).showModal();
}

export const closeDialog = (id) => $(id).close();
export const isDialogOpen = () => document.querySelector("dialog[open]") !== null;

// Buttons with data-close close their dialog, and so does a click beside it.
export function setUpDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
    });
  }
}

// Offer a text as a file.
export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
