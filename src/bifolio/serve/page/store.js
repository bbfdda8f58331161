// Conversations as trees of messages, kept in the browser's local storage.
//
//   conversation {id, title, mode: "chat" | "text", system, nodes: [...], leaf, updated}
//   node         {id, parent, role: "user" | "assistant", text, group, variant, settings, finish, stats, model, images}
//
// An answer's probabilities, drafts and beams are large and live as long as the page.

const PREFIX = "bifolio:conversation:";
export const LONGEST_TITLE = 120;
export const FIGURES = ["tokens", "first", "firstCount", "seconds", "prompt", "cached"]; // of an answer's `stats`
const removed = new Set(); // a run that ends later must not bring its conversation back
let serial = 0;
export const newId = () => `${Date.now().toString(36)}${(serial++).toString(36)}${Math.random().toString(36).slice(2, 6)}`;

export function newConversation(mode) {
  return { id: newId(), title: "", mode, system: "", nodes: [], leaf: null, updated: Date.now() };
}

export function all() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const name = localStorage.key(index);
    if (name.startsWith(PREFIX)) {
      const conversation = load(name.slice(PREFIX.length));
      if (conversation) found.push(conversation);
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function load(id) {
  try {
    const conversation = JSON.parse(localStorage.getItem(PREFIX + id));
    for (const node of conversation.nodes) {
      if (node.role === "assistant" && !node.finish) node.finish = "interrupted"; // the page was closed meanwhile
    }
    return conversation;
  } catch {
    return null; // not ours, or damaged
  }
}

// The part of a conversation that is kept.
export function stored(conversation) {
  const kept = ({ id, parent, role, text, group, variant, settings, finish, stats, model, images }) =>
    ({ id, parent, role, text, group, variant, settings, finish, stats, model, images });
  return { ...conversation, nodes: conversation.nodes.map(kept) };
}

// True when it was kept. A full storage loses its oldest conversations first, unless it must not.
export function save(conversation, { mayEvict = true } = {}) {
  if (!conversation.nodes.length || removed.has(conversation.id)) return true;
  const text = JSON.stringify(stored(conversation));
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return true;
    } catch {
      if (!mayEvict) return false;
      const oldest = all().filter((each) => each.id !== conversation.id).at(-1);
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

export function remove(id) {
  removed.add(id);
  localStorage.removeItem(PREFIX + id);
}

export const restore = (id) => removed.delete(id);

// False when the title is empty.
export function rename(conversation, title) {
  const line = title.replace(/\s+/g, " ").trim().slice(0, LONGEST_TITLE);
  if (!line) return false;
  conversation.title = line;
  return save(conversation);
}

export const isConversation = (name) => name === null || name.startsWith(PREFIX);

// -- the tree --------------------------------------------------------------------------------------------------------

export const nodeOf = (conversation, id) => conversation.nodes.find((node) => node.id === id);
export const childrenOf = (conversation, id) => conversation.nodes.filter((node) => node.parent === id);

export function addNode(conversation, fields) {
  const node = { id: newId(), text: "", ...fields };
  conversation.nodes.push(node);
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.text);
  return node;
}

export function titleOf(text) {
  const line = text.replace(/^```.*$|[#*`>]+/gm, "").trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47)}…` : line;
}

// From the first message to `id`.
export function pathTo(conversation, id) {
  const path = [];
  for (let node = nodeOf(conversation, id); node; node = nodeOf(conversation, node.parent)) path.unshift(node);
  return path;
}

// The end of the newest branch through a node.
export function newestLeaf(conversation, id) {
  for (;;) {
    const newest = childrenOf(conversation, id).at(-1);
    if (!newest) return id;
    id = newest.id;
  }
}

// -- small choices of the reader ---------------------------------------------------------------------------------------

export function recall(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`bifolio:${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// False when the storage is full or forbidden: the choice lasts as long as the page.
export function remember(name, value) {
  try {
    localStorage.setItem(`bifolio:${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
