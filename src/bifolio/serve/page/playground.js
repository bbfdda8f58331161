// The playground: conversations in the browser, the message box, and runs.
import { drawBranches, setUpBranches } from "./branches.js";
import { drawChats, setUpChats } from "./chats.js";
import { $, announce, onFrame } from "./core.js";
import { giveBack, load, setUpImages, showAttach, takeAttached } from "./images.js";
import { setUpPrompts } from "./prompts.js";
import { answer, bodies, isRunning, stopRun } from "./run.js";
import { markInvalid, setUpSettings, showDefaults } from "./settings.js";
import { state } from "./state.js";
import * as store from "./store.js";
import { currentNode, drawThread, follow, reveal, setUpThread, updateMessage } from "./thread.js";
import { drawLegend } from "./tokens.js";

export function setUpPlayground() {
  setUpSettings(() => {});
  setUpThread({
    regenerate: (node) => run(node.parent),
    carryOn: (node) => run(node.id),
    branch: (node) => goTo(node.id),
    open: (node) => goTo(store.newestLeaf(state.conversation, node.id)),
    edit: (node, text, images) => run(store.addNode(state.conversation, { parent: node.parent, role: "user", text, images }).id),
  });
  setUpBranches((node) => goTo(node.id));
  setUpChats({ open: openAt, changed: drawAll, problem });
  setUpPrompts((text) => {
    $("system").value = text;
    $("system").oninput();
  });
  setUpImages(problem);
  $("composer").onsubmit = (event) => {
    event.preventDefault();
    send();
  };
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("prompt").addEventListener("input", grow);
  $("stop").onclick = stop;
  $("new-chat").onclick = () => open(store.newConversation("chat"), true);
  $("new-text").onclick = () => open(store.newConversation("text"), true);
  $("system").oninput = () => {
    state.conversation.system = $("system").value;
    store.save(state.conversation);
  };
  for (const radio of document.querySelectorAll("input[name=view]")) {
    radio.checked = radio.value === state.view;
    radio.onchange = () => show(radio.value);
  }
  addEventListener("storage", (event) => store.isConversation(event.key) && drawChats());
  drawLegend($("legend"), state.view);
  open(store.load(store.recall("open", "")) ?? store.all()[0] ?? store.newConversation("chat"));
}

function show(view) {
  state.view = view;
  store.remember("view", view);
  drawLegend($("legend"), view);
  drawThread();
}

// -- conversations -----------------------------------------------------------------------------------------------------

function open(conversation, focus = false) {
  stopRun();
  state.conversation = conversation;
  store.remember("open", conversation.id);
  const chat = conversation.mode === "chat";
  $("system-field").hidden = !chat;
  $("system").value = conversation.system;
  $("prompt").placeholder = chat ? "Write a message" : "Write the beginning of a text";
  $("prompt-label").textContent = chat ? "Message" : "Prompt";
  $("problem").hidden = true;
  defaults();
  drawAll();
  load(conversation, () => conversation === state.conversation && drawThread());
  follow();
  document.body.classList.remove("with-sidebar");
  if (focus) $("prompt").focus();
}

// Open a conversation, and the newest branch through one of its messages.
function openAt(id, node) {
  const conversation = (id && store.load(id)) ?? store.newConversation("chat");
  if (node) conversation.leaf = store.newestLeaf(conversation, node);
  open(conversation, true);
  if (!node) return;
  store.save(conversation);
  reveal(node);
}

export function defaults() {
  showDefaults(state.card?.sampling_defaults ?? {}, state.conversation.mode);
  showAttach();
}

function drawAll() {
  drawChats();
  drawBranches();
  drawThread();
  drawContext();
  const title = state.conversation.title || (state.conversation.mode === "chat" ? "New chat" : "New completion");
  $("title").textContent = title;
}

export const redraw = () => drawThread();

// -- keys ----------------------------------------------------------------------------------------------------------------

const lastAnswer = () => store.pathTo(state.conversation, state.conversation.leaf).findLast((node) => node.role === "assistant");

// Answer again, where the open branch ends with an answer.
export function regenerate() {
  if (currentNode()?.role === "assistant") run(currentNode().parent);
}

export async function copyLast() {
  const node = lastAnswer();
  if (!node) return;
  try {
    await navigator.clipboard.writeText(node.text);
    announce("The answer was copied.");
  } catch {
    announce("The browser forbids copying.");
  }
}

function goTo(id) {
  if (isRunning()) stopRun();
  state.conversation.leaf = id;
  store.save(state.conversation);
  drawAll();
  $("prompt").focus();
}

// How full the model's context is behind the open branch.
export function drawContext() {
  const { conversation, card, isLost } = state;
  const stats = store.nodeOf(conversation, conversation.leaf)?.stats;
  const known = card && !isLost && stats?.prompt;
  $("used").textContent = known ? `context: ${stats.prompt + stats.tokens} of ${card.max_model_len} tokens` : "";
}

// -- runs --------------------------------------------------------------------------------------------------------------

function send() {
  const text = $("prompt").value;
  if (!text.trim() || isRunning()) return;
  const { conversation } = state;
  const chat = conversation.mode === "chat";
  const parent = chat ? conversation.leaf : null; // a completion begins with its own prompt
  const images = takeAttached();
  const fields = { parent, role: "user", text: chat ? text.trim() : text, ...(images.length && { images }) };
  const node = store.addNode(conversation, fields);
  if (run(node.id)) {
    $("prompt").value = "";
    grow();
  } else {
    conversation.nodes.pop();
    giveBack(images);
  }
}

// Answer a message; false when the options cannot be read.
function run(parent) {
  if (isRunning()) return false;
  const { conversation } = state;
  let requests;
  try {
    requests = bodies(conversation, parent);
  } catch (error) {
    problem(error.message);
    if (error.field) markInvalid(error.variant, error.field);
    return false;
  }
  $("problem").hidden = true;
  const view = {
    structure: () => conversation === state.conversation && drawAll(),
    update: (node) => conversation === state.conversation && updateMessage(node),
    done: (node) => finished(conversation, node),
  };
  answer(conversation, parent, requests, view).finally(buttons);
  buttons();
  follow();
  return true;
}

function finished(conversation, node) {
  if (node.error && conversation === state.conversation) problem(node.error);
  if (node.finish === "lost") document.dispatchEvent(new Event("lost"));
  const states = { stopped: "Stopped. ", lost: "The connection was lost. ", error: "The request failed. " };
  announce(`${states[node.finish] ?? "Answer: "}${node.text}`);
  onFrame("branches", () => conversation === state.conversation && drawBranches());
}

function buttons() {
  const running = isRunning();
  $("run").hidden = running;
  $("stop").hidden = !running;
}

export function stop() {
  if (!isRunning()) return false;
  stopRun();
  $("prompt").focus();
  return true;
}

export function problem(message) {
  $("problem").textContent = message;
  $("problem").hidden = false;
}

// The box grows with its text, up to a third of the window.
function grow() {
  const box = $("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight / 3)}px`;
}
