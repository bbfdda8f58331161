// Beams as a tree: what they have in common is written once, and branches are indented below it.
import { make } from "./core.js";

// Nested nodes {tokens, children, beams}: a chain without branches is one node.
export function buildTree(beams) {
  const root = { tokens: [], children: [], beams: beams.map((_, index) => index) };
  split(root, beams, 0);
  return root;
}

function split(node, beams, depth) {
  const groups = new Map();
  for (const index of node.beams) {
    const token = beams[index].tokens[depth];
    if (token === undefined) continue;
    if (!groups.has(token.text)) groups.set(token.text, []);
    groups.get(token.text).push(index);
  }
  for (const members of groups.values()) {
    const child = { tokens: [], children: [], beams: members };
    let level = depth;
    for (;;) {
      const token = beams[members[0]].tokens[level];
      const shared = members.every((index) => beams[index].tokens[level]?.text === token?.text);
      if (token === undefined || !shared) break;
      child.tokens.push(token);
      level += 1;
    }
    node.children.push(child);
    if (members.length > 1) split(child, beams, level);
  }
}

const textOf = (tokens) => new TextDecoder().decode(new Uint8Array(tokens.flatMap((token) => token.bytes)));

export function drawTree(target, choices, prompt) {
  const branch = (node, text) => {
    const row = make("div", { className: "segment" }, make("span", { textContent: text || "∅" }));
    const ends = node.beams.filter((index) => endsHere(node, choices[index]));
    for (const index of ends) {
      const score = choices[index].beam?.score;
      row.append(make("b", { className: "score", textContent: score?.toFixed(3) ?? "", title: "score of the beam" }));
    }
    const item = make("li", { className: node.beams.includes(0) ? "best" : "" }, row);
    if (node.children.length) {
      item.append(make("ul", {}, ...node.children.map((child) => branch(child, textOf(child.tokens)))));
    }
    return item;
  };
  const root = buildTree(choices);
  target.replaceChildren(make("ul", { className: "tree" }, branch(root, prompt || "start")));
  target.hidden = false;
}

// A beam that is the beginning of others ends at an inner node.
function endsHere(node, choice) {
  if (!node.tokens.length) return false;
  const continued = node.children.some((child) => choice.tokens.includes(child.tokens[0]));
  return !node.children.length || (!continued && choice.tokens.at(-1)?.text === node.tokens.at(-1).text);
}
