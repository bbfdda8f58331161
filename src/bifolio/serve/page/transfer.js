// Conversations as files: JSON of all or one, Markdown of one, and JSON read back, checked field by field.
//
//   {format: "bifolio-chats", version: 1, exported, conversations: [...]}
//   {messages: [{role, content}, ...]}                          as `bifolio chat` saves; a file of one chat has it as well
import * as store from "./store.js";

const FORMAT = "bifolio-chats";
const VERSION = 1;
export const MAX_FILE_BYTES = 20e6;
const MOST = { chats: 2000, messages: 5000, text: 2_000_000, short: 500 };

export class ImportError extends Error {}

// -- export ------------------------------------------------------------------------------------------------------------

export function asJson(conversations, isSingle = false) {
  const record = { format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations: conversations.map(withoutImages) };
  if (isSingle) record.messages = messagesOf(conversations[0]);
  return `${JSON.stringify(record, null, 1)}\n`;
}

// Images stay in the browser: a file has the texts alone.
function withoutImages(conversation) {
  const copy = store.stored(conversation);
  return { ...copy, nodes: copy.nodes.map((node) => ({ ...node, images: undefined })) };
}

// The open branch, as a request holds it.
function messagesOf(conversation) {
  const messages = store.pathTo(conversation, conversation.leaf).map(({ role, text }) => ({ role, content: text }));
  return conversation.system.trim() ? [{ role: "system", content: conversation.system }, ...messages] : messages;
}

// The open branch as a document.
export function asMarkdown(conversation) {
  const chat = conversation.mode === "chat";
  const names = chat ? { user: "You", assistant: "Answer" } : { user: "Prompt", assistant: "Completion" };
  const parts = [`# ${(conversation.title || "Untitled").replace(/[\\`*_[\]<>#]/g, "\\$&")}`];
  if (chat && conversation.system.trim()) parts.push("## System", conversation.system.trim());
  for (const node of store.pathTo(conversation, conversation.leaf)) {
    parts.push(`## ${names[node.role]}${node.model ? ` (${node.model})` : ""}`, node.text.trim());
  }
  return `${parts.join("\n\n")}\n`;
}

export function fileName(title, suffix) {
  const safe = title.normalize("NFKC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${safe || "chat"}.${suffix}`;
}

// -- import ------------------------------------------------------------------------------------------------------------

// The conversations of a file; ImportError says which part of it is wrong.
export function readChats(text, name) {
  let record;
  try {
    record = JSON.parse(text);
  } catch {
    throw new ImportError("it is no JSON");
  }
  if (isObject(record) && record.format === undefined && Array.isArray(record.messages)) return [fromMessages(record.messages, name)];
  if (!isObject(record) || record.format !== FORMAT || !Array.isArray(record.conversations)) {
    throw new ImportError("it is no file of chats that this page exported or `bifolio chat` saved");
  }
  if (record.version !== VERSION) throw new ImportError(`it has version ${String(record.version)} of the format, and this page reads version ${VERSION}`);
  if (record.conversations.length > MOST.chats) throw new ImportError(`it has more than ${MOST.chats} chats`);
  const found = record.conversations.map((each, index) => conversationOf(each, `chat ${index + 1}`));
  if (new Set(found.map(({ id }) => id)).size < found.length) throw new ImportError("it holds one chat twice");
  return found;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function checked(holds, place, problem) {
  if (!holds) throw new ImportError(`${place} ${problem}`);
}

const isText = (value, most = MOST.text) => typeof value === "string" && value.length <= most;
const isId = (value) => typeof value === "string" && /^[\w-]{1,64}$/.test(value);

function conversationOf(record, place) {
  checked(isObject(record), place, "is no object");
  const { id, title, mode, system, nodes, leaf, updated } = record;
  checked(isId(id), place, "has no id");
  checked(isText(title, MOST.short), place, "has no title");
  checked(mode === "chat" || mode === "text", place, "is neither a chat nor a completion");
  checked(isText(system), place, "has no system message");
  checked(Number.isFinite(updated), place, "has no date");
  checked(Array.isArray(nodes) && nodes.length > 0 && nodes.length <= MOST.messages, place, `has no messages, or more than ${MOST.messages}`);
  const seen = new Set();
  const read = nodes.map((node, index) => nodeOf(node, seen, `${place}, message ${index + 1},`));
  checked(seen.has(leaf), place, "does not say which message is open");
  return { id, title, mode, system, nodes: read, leaf, updated: Math.min(updated, Date.now()) };
}

// A message answers one that stands before it, so that messages are a tree.
function nodeOf(record, seen, place) {
  checked(isObject(record), place, "is no object");
  const { id, parent, role, text } = record;
  checked(isId(id) && !seen.has(id), place, "has no id of its own");
  checked(parent === null || seen.has(parent), place, "answers a message that does not stand before it");
  checked(role === "user" || role === "assistant", place, "has no role");
  checked(isText(text), place, "has no text");
  seen.add(id);
  const node = { id, parent, role, text };
  for (const name of ["group", "settings", "finish", "model"]) {
    if (record[name] === undefined || record[name] === null) continue;
    checked(isText(record[name], MOST.short), place, `has a wrong ${name}`);
    node[name] = record[name];
  }
  if (record.variant !== undefined) {
    checked(record.variant === 0 || record.variant === 1, place, "has a wrong variant");
    node.variant = record.variant;
  }
  if (role === "assistant") node.finish ??= "interrupted";
  if (record.stats !== undefined) {
    checked(isObject(record.stats) && Object.values(record.stats).every(Number.isFinite), place, "has wrong figures");
    node.stats = Object.fromEntries(store.FIGURES.filter((name) => name in record.stats).map((name) => [name, record.stats[name]]));
  }
  return node;
}

function fromMessages(messages, name) {
  checked(messages.length <= MOST.messages, "it", `has more than ${MOST.messages} messages`);
  const conversation = store.newConversation("chat");
  messages.forEach((message, index) => {
    const place = `message ${index + 1}`;
    checked(isObject(message) && isText(message.content), place, "has no text");
    checked(["system", "user", "assistant"].includes(message.role), place, "has no role that this page shows");
    if (message.role === "system") {
      conversation.system = [conversation.system, message.content].filter(Boolean).join("\n\n");
      return;
    }
    const finish = message.role === "assistant" ? { finish: "stop" } : {};
    conversation.leaf = store.addNode(conversation, { parent: conversation.leaf, role: message.role, text: message.content, ...finish }).id;
  });
  checked(conversation.nodes.length > 0, "it", "has no messages");
  conversation.title ||= name.replace(/\.json$/i, "").slice(0, store.LONGEST_TITLE);
  return conversation;
}

// Sort chats by their relation to those of this browser: unknown, equal, or with the id of one that differs.
export function compared(conversations) {
  const groups = { fresh: [], same: [], changed: [] };
  for (const conversation of conversations) {
    const mine = store.load(conversation.id);
    const isSame = mine && content(mine) === content(conversation);
    groups[isSame ? "same" : mine ? "changed" : "fresh"].push(conversation);
  }
  return groups;
}

const content = ({ title, system, nodes }) => JSON.stringify([title, system, nodes.map(({ id, parent, role, text }) => [id, parent, role, text])]);

// Keep the new chats, and those that differ as `choice` says: "both", "mine" or "theirs". No other chat is removed for them.
export function apply({ fresh, changed }, choice) {
  const wanted = [...fresh];
  if (choice === "theirs") wanted.push(...changed);
  if (choice === "both") {
    wanted.push(...changed.map((each) => ({ ...each, id: store.newId(), title: `${each.title.slice(0, store.LONGEST_TITLE - 11)} (imported)` })));
  }
  const taken = wanted.filter((conversation) => {
    store.restore(conversation.id); // it may have been deleted before
    return store.save(conversation, { mayEvict: false });
  });
  return { taken, left: wanted.length - taken.length };
}
