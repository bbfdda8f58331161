// The messages of the open branch, and the actions below them.
import { drawBeams } from "./beams.js";
import { $, make, plural } from "./core.js";
import { known, thumbnails } from "./images.js";
import { copyText, renderMarkdown } from "./markdown.js";
import { state } from "./state.js";
import { childrenOf, nodeOf, pathTo } from "./store.js";
import { draftSummary, renderTokens, watchTokens } from "./tokens.js";

const drawn = new Map(); // node id -> its elements
let actions = {}; // edit, regenerate, branch, carryOn, open
let sticks = true; // follow the end of the text

const REASONS = {
  length: "cut at max_tokens", stopped: "stopped", interrupted: "interrupted: the page was closed",
  lost: "the connection to the server was lost", abort: "aborted by the server",
};

export function setUpThread(handlers) {
  actions = handlers;
  const thread = $("thread");
  thread.addEventListener("scroll", () => {
    sticks = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 60;
    $("latest").hidden = sticks;
  }, { passive: true });
  $("latest").onclick = () => {
    follow();
    $("prompt").focus();
  };
  watchTokens($("messages"));
}

// Scroll to the end, now and while the text grows.
export function follow() {
  sticks = true;
  toEnd();
}

// Bring a message into view and mark it.
export function reveal(id) {
  const article = drawn.get(id)?.article;
  if (!article) return;
  sticks = false;
  article.tabIndex = -1;
  article.classList.add("found");
  article.scrollIntoView({ block: "center" });
  article.focus({ preventScroll: true });
}

function toEnd() {
  if (sticks) $("thread").scrollTop = $("thread").scrollHeight;
}

export function drawThread() {
  const { conversation } = state;
  drawn.clear();
  const path = pathTo(conversation, conversation.leaf);
  const parts = path.map((node, index) => {
    const group = index === path.length - 1 ? groupOf(conversation, node) : [node];
    if (group.length === 1) return message(node);
    return make("div", { className: "group", role: "group", "aria-label": `${group.length} answers side by side` }, ...group.map(message));
  });
  if (!parts.length) parts.push(welcome(conversation));
  $("messages").replaceChildren(...parts);
  for (const { node } of drawn.values()) updateMessage(node);
  toEnd();
}

function welcome(conversation) {
  const chat = conversation.mode === "chat";
  const lines = chat
    ? ["Ask the model", "Answers stream in as they are made. Every edit and every new answer is a branch that you can return to."]
    : ["Complete a text", "Write the beginning; the model writes on. Continue, or try again on another branch."];
  const node = make("div", { className: "welcome" }, make("h3", { textContent: lines[0] }), make("p", { textContent: lines[1] }));
  if (chat && state.card && !state.card.has_chat_template) {
    node.append(make("p", { className: "problem", textContent:
      "This model has no chat template: it was trained to continue texts. Choose New completion." }));
  }
  return node;
}

// Answers of one run are shown together.
function groupOf(conversation, node) {
  return node.group ? childrenOf(conversation, node.parent).filter((each) => each.group === node.group) : [node];
}

function message(node) {
  const { conversation } = state;
  const isAnswer = node.role === "assistant";
  const chosen = node.id === conversation.leaf;
  const name = isAnswer ? (conversation.mode === "chat" ? "Answer" : "Completion") : conversation.mode === "chat" ? "You" : "Prompt";
  const variant = node.variant === undefined ? "" : ` ${"AB"[node.variant]}`;
  const head = make("div", { className: "message-head" }, make("span", { className: "who", textContent: name + variant }));
  if (node.variant !== undefined) head.append(make("span", { className: "muted small", textContent: node.settings || "server defaults" }));
  head.append(make("span", { className: "grow" }), ...switcher(node));
  const body = make("div", { className: "text" });
  const beams = make("div", { className: "beams", hidden: true, tabIndex: 0, role: "group", "aria-label": "Beams" });
  const stats = make("span", { className: "stats muted small" });
  const buttons = make("span", { className: "buttons" }, ...buttonsOf(node));
  const article = make("article", { className: `message ${node.role}${chosen && groupOf(conversation, node).length > 1 ? " chosen" : ""}`,
                                    "aria-label": name + variant },
                       head, ...(node.images?.length ? [thumbnails(node.images)] : []), body, beams, make("div", { className: "message-foot" }, buttons, ...(isAnswer ? [stats] : [])));
  article.dataset.node = node.id;
  drawn.set(node.id, { node, article, body, beams, stats, buttons });
  return article;
}

function button(label, act, title) {
  const node = make("button", { type: "button", className: "quiet small", textContent: label, title: title ?? "" });
  node.onclick = () => act(node);
  return node;
}

function buttonsOf(node) {
  const { conversation } = state;
  const list = [button("Copy", (self) => copyText(self, node.text))];
  if (node.role === "user") return [...list, button("Edit", () => edit(node), "Send another version, on a branch of its own")];
  list.push(button("Regenerate", () => actions.regenerate(node), "Another answer, on a branch of its own"));
  if (conversation.mode === "text") list.push(button("Continue", () => actions.carryOn(node), "Write on behind this text"));
  if (node.id !== conversation.leaf) list.push(button("Branch", () => actions.branch(node), "Go on from here; later messages keep their branch"));
  return list;
}

// ‹ 2 / 3 ›: the other versions of a message.
function switcher(node) {
  const { conversation } = state;
  const siblings = childrenOf(conversation, node.parent);
  const versions = siblings.filter((each, index) => !each.group || siblings.findIndex((other) => other.group === each.group) === index);
  if (versions.length < 2) return [];
  const at = versions.findIndex((each) => each.id === node.id || (each.group && each.group === node.group));
  const step = (move, label, sign) => {
    const other = versions[at + move];
    const control = button(sign, () => actions.open(other));
    control.setAttribute("aria-label", label);
    control.disabled = !other;
    return control;
  };
  return [make("span", { className: "switcher" }, step(-1, "Previous version", "‹"),
               make("span", { className: "small", textContent: `${at + 1} / ${versions.length}` }), step(1, "Next version", "›"))];
}

function edit(node) {
  const { body, buttons } = drawn.get(node.id);
  const area = make("textarea", { value: node.text, rows: Math.min(12, node.text.split("\n").length + 1), className: "edit",
                                  "aria-label": "Edit the message" });
  const send = button("Send", () => area.value.trim() && actions.edit(node, area.value, known(node.images)));
  send.classList.replace("quiet", "primary");
  area.onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send.click();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      drawThread();
      $("prompt").focus();
    }
  };
  body.className = "text editing";
  body.replaceChildren(area);
  buttons.replaceChildren(send, button("Cancel", drawThread));
  area.focus();
}

// -- one message as it grows -------------------------------------------------------------------------------------------

export function updateMessage(node) {
  const parts = drawn.get(node.id);
  if (!parts) return; // another branch is open
  const { article, body, stats, beams } = parts;
  const running = node.role === "assistant" && !node.finish;
  article.classList.toggle("running", running);
  article.setAttribute("aria-busy", running);
  if (!body.classList.contains("editing")) renderBody(body, node);
  if (node.beams) {
    beams.hidden = false;
    drawBeams(beams, node.beams);
  }
  if (node.role === "assistant") {
    drawFigures(stats, node);
    if (node.error) article.classList.add("failed");
  }
  toEnd();
}

function renderBody(body, node) {
  const isAnswer = node.role === "assistant";
  const view = isAnswer && node.tokens?.length && node.hasScores ? state.view : "text";
  const mode = isAnswer && view === "text" && state.conversation.mode === "chat" ? "markdown" : view === "text" ? "plain" : view;
  if (body.dataset.mode !== mode) {
    body.replaceChildren();
    body.progress = body.drawnBlocks = undefined;
    body.dataset.mode = mode;
    body.className = `text ${mode}`;
  }
  if (mode === "markdown") renderMarkdown(body, node.text);
  else if (mode === "plain") renderPlain(body, node);
  else renderTokens(body, node, view);
}

function renderPlain(body, node) {
  if (!body.firstChild) body.append("");
  const { firstChild } = body;
  if (node.text.startsWith(firstChild.data)) firstChild.appendData(node.text.slice(firstChild.length));
  else firstChild.data = node.text;
}

// [text, meaning] of each figure below an answer.
function figures(node) {
  const { tokens = 0, first, firstCount = 1, seconds, prompt, cached = 0 } = node.stats ?? {};
  const parts = [];
  if (node.model && (state.cards.length > 1 || (state.card && node.model !== state.card.id))) parts.push([node.model, "Model"]);
  if (tokens) parts.push([plural(tokens, "token"), "Tokens of the answer"]);
  if (seconds > 0.05 && tokens > firstCount) {
    parts.push([`${((tokens - firstCount) / seconds).toFixed(0)} tokens/s`, "Speed after the first token, as it arrived here"]);
  }
  if (first !== undefined) parts.push([`first after ${first.toFixed(0)} ms`, "Time to first token: from sending to its arrival"]);
  if (prompt) {
    parts.push([`${cached} of ${prompt} prompt tokens cached (${Math.round((100 * cached) / prompt)} %)`,
                "Tokens of the prompt whose keys and values the server had cached"]);
  }
  if (draftSummary(node)) parts.push([draftSummary(node)]);
  if (node.settings && node.variant === undefined) parts.push([node.settings, "Options that were set"]);
  if (node.error) parts.push([node.error]);
  else if (Object.hasOwn(REASONS, node.finish)) parts.push([REASONS[node.finish]]);
  if (state.view !== "text" && node.finish && !node.hasScores) parts.push(["made without token data: regenerate it to see them"]);
  return parts;
}

function drawFigures(line, node) {
  const parts = figures(node).map(([textContent, title]) => make("span", { textContent, title: title ?? "" }));
  line.replaceChildren(...parts.flatMap((part, index) => (index ? [" · ", part] : [part])));
}

export const currentNode = () => nodeOf(state.conversation, state.conversation.leaf);
