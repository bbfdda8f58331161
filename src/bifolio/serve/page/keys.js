// The keyboard map. Letters alone are shortcuts outside of fields, so that none of the browser's own keys is taken; a
// screen reader keeps its letters while it reads, and the shortcuts can be turned off.
import { $, make } from "./core.js";
import { isDialogOpen, openDialog } from "./dialogs.js";
import { recall, remember } from "./store.js";

const MAP = [
  ["Anywhere", [
    ["?", "Keyboard map", "help"], ["n", "New chat", "newChat"], ["s", "Search in the chats", "search"],
    ["i", "Message box", "input"], ["r", "Regenerate the last answer", "regenerate"], ["c", "Copy the last answer", "copy"],
    ["Escape", "Stop the answer, or close a panel"],
  ]],
  ["In the message box", [
    ["Enter", "Send"], ["Shift + Enter", "Break the line"], ["Escape", "Stop the answer, or leave the box: letters are shortcuts then"],
  ]],
  ["In tabs, branches and versions", [["Arrow keys", "Move"], ["Enter", "Open"]]],
];
const FIELDS = "input:not([type=radio]):not([type=checkbox]), textarea, select, [contenteditable]";

export function setUpKeys(actions) {
  const byKey = new Map(MAP[0][1].filter(([, , name]) => name).map(([key, , name]) => [key, name]));
  const all = { ...actions, help: () => openDialog("keys-dialog") };
  $("single-keys").checked = recall("singleKeys", true);
  $("single-keys").onchange = () => remember("singleKeys", $("single-keys").checked);
  $("show-keys").onclick = all.help;
  $("keys").replaceChildren(...MAP.map(section));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat || event.defaultPrevented) return;
    if (!$("single-keys").checked || isDialogOpen() || event.target.closest?.(FIELDS)) return;
    const name = byKey.get(event.key);
    if (!name) return;
    event.preventDefault();
    all[name]();
  });
}

function section([title, rows]) {
  const lines = rows.map(([key, meaning]) => make("tr", {}, make("td", {}, make("kbd", { textContent: key })), make("td", { textContent: meaning })));
  return make("table", {}, make("caption", { textContent: title }),
              make("thead", { className: "sr-only" }, make("tr", {}, make("th", { scope: "col", textContent: "Key" }), make("th", { scope: "col", textContent: "Effect" }))),
              make("tbody", {}, ...lines));
}
