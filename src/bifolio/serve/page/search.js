// Search in the titles and messages of conversations, without regard to case and accents.

const AROUND = 14; // characters before a match in its line
const LONGEST = 90; // characters of the line

// Letters without case and accents, with the place of each in the text.
function folded(text) {
  const letters = [];
  const places = [];
  let at = 0;
  for (const letter of text) {
    for (const part of letter.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase()) {
      letters.push(part);
      for (let unit = 0; unit < part.length; unit += 1) places.push(at);
    }
    at += letter.length;
  }
  return { text: letters.join(""), places: [...places, at] };
}

const plain = (text) => text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();

// The first match in a text: [start, end]; null where there is none.
function find(text, wanted) {
  if (!plain(text).includes(wanted)) return null;
  const { text: letters, places } = folded(text);
  const at = letters.indexOf(wanted);
  return at < 0 ? null : [places[at], places[at + wanted.length]];
}

// {conversation, node, line: [before, match, after]} of each conversation that holds all words of the query, in the
// title or in its messages; `node` is the newest message with a match, null if only the title has one.
export function search(conversations, query) {
  const words = plain(query).split(/\s+/).filter(Boolean);
  if (!words.length) return conversations.map((conversation) => ({ conversation, node: null, line: null }));
  return conversations.filter((conversation) => {
    const all = plain([conversation.title, conversation.system, ...conversation.nodes.map((node) => node.text)].join("\n"));
    return words.every((word) => all.includes(word));
  }).map((conversation) => ({ conversation, ...place(conversation, [words.join(" "), ...words]) }));
}

function place(conversation, wanted) {
  for (const word of wanted) {
    for (const node of [...conversation.nodes].reverse()) {
      const found = find(node.text, word);
      if (found) return { node, line: cut(node.text, ...found) };
    }
  }
  return { node: null, line: null };
}

function cut(text, start, end) {
  const from = Math.max(0, start - AROUND);
  const oneLine = (part) => part.replace(/\s+/g, " ");
  const before = `${from ? "…" : ""}${oneLine(text.slice(from, start))}`;
  const after = oneLine(text.slice(end, end + LONGEST));
  return [before, oneLine(text.slice(start, end)), after];
}
