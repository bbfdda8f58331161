// Conversations as trees of messages, kept in the browser's local storage.
//
//   conversation {id, title, mode: "chat" | "text", system, nodes: [...], leaf, updated}
//   node         {id, parent, role: "user" | "assistant", text, group, variant, settings, finish, stats}
//
// An answer's probabilities, drafts and beams are large and live as long as the page.

const PREFIX = "bifolio:conversation:";
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

// True when it was kept. A full storage loses its oldest conversations first.
export function save(conversation) {
  if (!conversation.nodes.length) return true;
  const kept = ({ id, parent, role, text, group, variant, settings, finish, stats }) =>
    ({ id, parent, role, text, group, variant, settings, finish, stats });
  const text = JSON.stringify({ ...conversation, nodes: conversation.nodes.map(kept) });
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return true;
    } catch {
      const oldest = all().filter((each) => each.id !== conversation.id).at(-1);
      if (!oldest) return false;
      remove(oldest.id);
    }
  }
}

export const remove = (id) => localStorage.removeItem(PREFIX + id);
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

export function remember(name, value) {
  try {
    localStorage.setItem(`bifolio:${name}`, JSON.stringify(value));
  } catch {
    // full or forbidden: the choice lasts as long as the page
  }
}
