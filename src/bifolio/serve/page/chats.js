// The list of conversations: search, open, rename, delete, export and import.
import { $, announce, make, plural } from "./core.js";
import { closeDialog, download, openDialog } from "./dialogs.js";
import { isRunning } from "./run.js";
import { search } from "./search.js";
import { state } from "./state.js";
import * as store from "./store.js";
import { ImportError, MAX_FILE_BYTES, apply, asJson, asMarkdown, compared, fileName, readChats } from "./transfer.js";

const PAUSE_MS = 150; // of typing, before a search
let actions = {}; // open(id of a conversation, id of a message), changed(), problem(sentence)
let incoming = null; // compared chats of the file in the import dialog

export function setUpChats(handlers) {
  actions = handlers;
  let timer = null;
  $("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      drawChats();
      if ($("search").value.trim()) announce($("found").textContent);
    }, PAUSE_MS);
  });
  $("rename").onclick = () => {
    $("rename-name").value = state.conversation.title;
    openDialog("rename-dialog");
    $("rename-name").select();
  };
  $("rename-form").onsubmit = (event) => {
    event.preventDefault();
    closeDialog("rename-dialog");
    if (!store.rename(state.conversation, $("rename-name").value)) return;
    actions.changed();
    announce(`Renamed: ${state.conversation.title}`);
  };
  $("export-json").onclick = () =>
    download(fileName(state.conversation.title, "json"), "application/json", asJson([state.conversation], true));
  $("export-markdown").onclick = () =>
    download(fileName(state.conversation.title, "md"), "text/markdown", asMarkdown(state.conversation));
  $("export-all").onclick = () => download(fileName("bifolio-chats", "json"), "application/json", asJson(store.all()));
  $("import").onclick = () => {
    if (isRunning()) actions.problem("Stop the answer before chats are imported.");
    else $("import-file").click();
  };
  $("import-file").onchange = async () => {
    const [file] = $("import-file").files;
    if (file) await offer(file);
    $("import-file").value = ""; // the same file can be chosen again
  };
  $("import-form").onsubmit = (event) => {
    event.preventDefault();
    take();
  };
}

// -- the list ----------------------------------------------------------------------------------------------------------

export function drawChats() {
  const query = $("search").value;
  const found = search(store.all(), query);
  $("conversations").replaceChildren(...found.map(row));
  $("found").hidden = !query.trim();
  $("found").textContent = found.length ? plural(found.length, "chat") + " found" : "No chat has these words.";
  const isEmpty = !state.conversation.nodes.length;
  for (const id of ["rename", "export-json", "export-markdown"]) $(id).disabled = isEmpty;
  $("export-all").disabled = !query.trim() && !found.length;
}

function row({ conversation, node, line }) {
  const current = conversation.id === state.conversation.id;
  const title = conversation.title || "Untitled";
  const choose = make("button", { type: "button", className: "conversation", "aria-current": current ? "true" : undefined },
                      make("span", { className: "name", textContent: title }));
  if (line) {
    const [before, match, after] = line;
    choose.append(make("span", { className: "match" }, before, make("mark", { textContent: match }), after));
  }
  choose.onclick = () => {
    if (!current || node) actions.open(conversation.id, node?.id);
  };
  const drop = make("button", { type: "button", className: "quiet small", textContent: "Delete", "aria-label": `Delete ${title}` });
  drop.onclick = () => {
    if (!confirm(`Delete "${title}"?`)) return;
    store.remove(conversation.id);
    if (current) actions.open(store.all()[0]?.id);
    else drawChats();
  };
  return make("li", {}, choose, drop);
}

// -- import ------------------------------------------------------------------------------------------------------------

async function offer(file) {
  incoming = null;
  let sentence;
  try {
    if (file.size > MAX_FILE_BYTES) throw new ImportError(`it has more than ${MAX_FILE_BYTES / 1e6} MB`);
    incoming = compared(readChats(await file.text(), file.name));
    sentence = summary(file.name);
  } catch (error) {
    if (!(error instanceof ImportError)) throw error;
    sentence = `${file.name} cannot be imported: ${error.message}.`;
  }
  $("import-summary").textContent = sentence;
  $("import-summary").className = incoming ? "" : "problem";
  $("import-choices").hidden = !incoming?.changed.length;
  $("import-keep").checked = true;
  $("import-run").hidden = !incoming || !(incoming.fresh.length + incoming.changed.length);
  openDialog("import-dialog");
}

function summary(name) {
  const { fresh, same, changed } = incoming;
  const parts = [`${name} holds ${plural(fresh.length + same.length + changed.length, "chat")}:`, `${fresh.length} new`];
  if (same.length) parts.push(`, ${same.length} already here`);
  if (changed.length) parts.push(`, ${changed.length} here with other messages`);
  return `${parts.join(" ").replaceAll(" ,", ",")}.`;
}

function take() {
  const choice = document.querySelector("input[name=import-choice]:checked").value;
  const { taken, left } = apply(incoming, choice);
  const full = left ? ` ${plural(left, "chat")} did not fit: the storage of the browser is full.` : "";
  if (full) {
    $("import-summary").textContent = `${plural(taken.length, "chat")} imported.${full}`;
    $("import-summary").className = "problem";
    $("import-choices").hidden = $("import-run").hidden = true;
  } else {
    closeDialog("import-dialog");
  }
  announce(`${plural(taken.length, "chat")} imported.${full}`);
  if (taken.length) actions.open(taken[0].id);
}
