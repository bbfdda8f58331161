// The colours of the page, set before it is drawn: those of the system, or the reader's choice.
"use strict";
{
  const ORDER = ["auto", "light", "dark"];
  const NAMES = { auto: "as the system", light: "light", dark: "dark" };
  const read = () => {
    try {
      return localStorage.getItem("bifolio:theme") || "auto";
    } catch {
      return "auto";
    }
  };
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.lastChild.textContent = theme;
    button.setAttribute("aria-label", `Theme: ${NAMES[theme]}`);
  };
  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    apply(read());
    document.getElementById("theme").addEventListener("click", () => {
      const next = ORDER[(ORDER.indexOf(read()) + 1) % ORDER.length];
      try {
        localStorage.setItem("bifolio:theme", next);
      } catch {
        // private windows keep no choice
      }
      apply(next);
      document.dispatchEvent(new Event("theme"));
    });
  });
}
