// A library of system messages, kept in the browser: [{id, name, text}].
import { $, announce, make } from "./core.js";
import { closeDialog, openDialog } from "./dialogs.js";
import { newId, recall, remember } from "./store.js";

export const MOST_PROMPTS = 100;
const LONGEST_NAME = 80;
const LONGEST_TEXT = 20_000;
let use = () => {};
let edited = null; // id of the prompt in the form; null: a new one

export function setUpPrompts(handler) {
  use = handler;
  $("prompt-name").maxLength = LONGEST_NAME;
  $("prompt-text").maxLength = LONGEST_TEXT;
  $("saved-prompt").onchange = () => {
    const chosen = all().find(({ id }) => id === $("saved-prompt").value);
    $("saved-prompt").value = "";
    if (chosen) choose(chosen);
  };
  $("save-prompt").onclick = () => {
    openDialog("prompts-dialog");
    edit(null, { name: "", text: $("system").value });
  };
  $("manage-prompts").onclick = () => {
    openDialog("prompts-dialog");
    edit(null, { name: "", text: "" });
  };
  $("prompts-form").onsubmit = (event) => {
    event.preventDefault();
    keep();
  };
  $("prompt-new").onclick = () => edit(null, { name: "", text: "" });
  addEventListener("storage", (event) => (event.key === null || event.key === "bifolio:prompts") && draw());
  draw();
}

const isPrompt = (value) => typeof value?.id === "string" && typeof value.name === "string" && typeof value.text === "string";

function all() {
  const found = recall("prompts", []);
  return Array.isArray(found) ? found.filter(isPrompt) : [];
}

function choose(prompt) {
  use(prompt.text);
  closeDialog("prompts-dialog");
  announce(`System message: ${prompt.name}`);
}

function edit(id, { name, text }) {
  edited = id;
  $("prompt-heading").textContent = id === null ? "New system message" : "Edit the system message";
  $("prompt-name").value = name;
  $("prompt-text").value = text;
  $("prompt-problem").hidden = true;
  draw();
  $("prompt-name").focus();
}

function keep() {
  const prompts = all();
  const name = $("prompt-name").value.trim();
  const text = $("prompt-text").value.trim();
  const isTaken = prompts.some((each) => each.id !== edited && each.name === name);
  if (!name || !text) return problem("A name and a text are needed.");
  if (isTaken) return problem(`"${name}" exists: choose another name, or edit that one.`);
  if (edited === null && prompts.length >= MOST_PROMPTS) return problem(`There are ${MOST_PROMPTS} already: delete one first.`);
  const prompt = { id: edited ?? newId(), name, text };
  const others = prompts.filter(({ id }) => id !== prompt.id);
  if (!write([...others, prompt])) return problem("The storage of the browser is full: delete some chats first.");
  announce(`Saved: ${name}`);
  return edit(null, { name: "", text: "" });
}

function write(prompts) {
  const sorted = prompts.sort((a, b) => a.name.localeCompare(b.name));
  return remember("prompts", sorted);
}

function problem(sentence) {
  $("prompt-problem").textContent = sentence;
  $("prompt-problem").hidden = false;
}

function draw() {
  const prompts = all();
  const options = prompts.map(({ id, name }) => make("option", { value: id, textContent: name }));
  $("saved-prompt").replaceChildren(make("option", { value: "", textContent: prompts.length ? "Choose a saved one" : "None saved yet" }), ...options);
  $("saved-prompt").disabled = !prompts.length;
  $("prompts").replaceChildren(...prompts.map(row));
  $("no-prompts").hidden = prompts.length > 0;
}

function row(prompt) {
  const act = (label, work) => {
    const node = make("button", { type: "button", className: "quiet small", textContent: label, "aria-label": `${label} ${prompt.name}` });
    node.onclick = work;
    return node;
  };
  const drop = () => {
    if (!confirm(`Delete "${prompt.name}"?`)) return;
    write(all().filter(({ id }) => id !== prompt.id));
    if (edited === prompt.id) edit(null, { name: "", text: "" });
    else draw();
    $("prompt-name").focus();
  };
  return make("li", { "aria-current": prompt.id === edited ? "true" : undefined },
              make("span", { className: "name", textContent: prompt.name, title: prompt.text.slice(0, 200) }),
              act("Use", () => choose(prompt)), act("Edit", () => edit(prompt.id, prompt)), act("Delete", drop));
}
