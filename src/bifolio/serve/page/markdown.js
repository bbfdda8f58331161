// Markdown as nodes. Text reaches the page as text nodes only: nothing that a model writes becomes HTML.
import { make } from "./core.js";
import { highlighted } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8; // levels of nesting; deeper ones stay text

// Draw `text` into `target`; blocks whose source has not changed since the last call keep their nodes.
export function renderMarkdown(target, text) {
  const blocks = splitBlocks(text.split("\n"));
  const drawn = target.drawnBlocks ?? [];
  let same = 0;
  while (same < drawn.length && same < blocks.length && drawn[same] === blocks[same].source) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(build(block, 0));
  target.drawnBlocks = blocks.map((block) => block.source);
}

// -- blocks ----------------------------------------------------------------------------------------------------------

function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [kind, end] = blockAt(lines, at);
    blocks.push({ kind, lines: lines.slice(at, end), source: `${kind}:${lines.slice(at, end).join("\n")}` });
    at = end;
  }
  return blocks;
}

// (kind, line behind the block) of the block that begins at a line.
function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return ["fence", endOfFence(lines, at, fence[1])];
  if (HEADING.test(line)) return ["heading", at + 1];
  if (RULE.test(line)) return ["rule", at + 1];
  if (QUOTE.test(line)) return ["quote", endWhere(lines, at, (each) => !QUOTE.test(each))];
  if (ITEM.test(line)) return ["list", endOfList(lines, at)];
  if (isTable(lines, at)) return ["table", endWhere(lines, at + 2, (each) => !each.includes("|"))];
  return ["paragraph", endWhere(lines, at + 1, (each, index) => !each.trim() || startsBlock(lines, index))];
}

const isTable = (lines, at) =>
  lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]);
const startsBlock = (lines, at) =>
  FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || QUOTE.test(lines[at])
  || ITEM.test(lines[at]) || isTable(lines, at);

function endWhere(lines, at, ends) {
  while (at < lines.length && !ends(lines[at], at)) at += 1;
  return at;
}

function endOfFence(lines, at, mark) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  const end = lines.findIndex((line, index) => index > at && closing.test(line));
  return end < 0 ? lines.length : end + 1;
}

// A list goes on over items, indented lines, and single empty lines before either.
function endOfList(lines, at) {
  let end = at + 1;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) continue;
    const belongs = ITEM.test(line) || /^\s{2,}/.test(line) || (next === end && !startsBlock(lines, next));
    if (!belongs || RULE.test(line) || next > end + 1) break;
    end = next + 1;
  }
  return end;
}

function build(block, depth) {
  const { kind, lines } = block;
  if (kind === "fence") return codeBlock(lines);
  if (kind === "rule") return make("hr");
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return make("p", { className: `heading h${marks.length}`, role: "heading", "aria-level": Math.min(6, marks.length + 2) },
                ...inline(text));
  }
  if (kind === "table") return table(lines);
  if (depth >= DEEPEST) return make("p", { textContent: lines.join("\n") });
  if (kind === "quote") {
    const inner = splitBlocks(lines.map((line) => line.replace(QUOTE, "")));
    return make("blockquote", {}, ...inner.map((each) => build(each, depth + 1)));
  }
  if (kind === "list") return list(lines, depth);
  return make("p", {}, ...inline(lines.join("\n")));
}

function codeBlock(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark) && !lines.at(-1).trim().replaceAll(mark[0], "");
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = make("button", { type: "button", className: "quiet small copy-code", textContent: "Copy" });
  copy.onclick = () => copyText(copy, code);
  return make("div", { className: "code-block" },
              make("div", { className: "code-top" }, make("span", { textContent: language || "text" }), copy),
              make("pre", { tabIndex: 0 }, make("code", {}, ...highlighted(code, language))));
}

export async function copyText(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser forbids copying";
  }
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}

function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) items.push([line.slice(match[0].length)]);
    else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent.length + (match ? 2 : marker.length + 1))));
  }
  const ordered = /\d/.test(marker);
  const node = make(ordered ? "ol" : "ul", ordered ? { start: parseInt(marker, 10) } : {});
  for (const item of items) node.append(listItem(item, depth));
  return node;
}

function listItem(lines, depth) {
  const node = make("li");
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) {
    lines[0] = lines[0].slice(task[0].length);
    node.append(make("span", { textContent: task[1] === " " ? "☐ " : "☑ " }));
  }
  splitBlocks(lines).forEach((block, index) => {
    if (block.kind === "paragraph" && index === 0) node.append(...inline(block.lines.join("\n")));
    else node.append(build(block, depth + 1));
  });
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const sides = cells(lines[1]).map((cell) => (/^:-+:$/.test(cell) ? "center" : cell.endsWith(":") ? "right" : "left"));
  const row = (line, tag) => make("tr", {}, ...cells(line).slice(0, sides.length).map((cell, index) => {
    const node = make(tag, {}, ...inline(cell));
    node.style.textAlign = sides[index];
    return node;
  }));
  return make("div", { className: "table", tabIndex: 0 }, make("table", {}, make("thead", {}, row(lines[0], "th")),
              make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))));
}

// -- inside a line -----------------------------------------------------------------------------------------------------

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

function inline(text, depth = 0) {
  const nodes = [];
  let begin = 0;
  SPECIAL.lastIndex = 0;
  for (let at = nextSpecial(text, 0); at >= 0; at = nextSpecial(text, at)) {
    const found = depth < DEEPEST ? spanAt(text, at, depth) : null;
    if (!found) {
      at += 1;
      continue;
    }
    nodes.push(text.slice(begin, at), ...found.nodes);
    begin = at = found.end;
  }
  nodes.push(text.slice(begin));
  return nodes;
}

function nextSpecial(text, from) {
  SPECIAL.lastIndex = from;
  const match = SPECIAL.exec(text);
  return match ? match.index : -1;
}

function spanAt(text, at, depth) {
  const letter = text[at];
  if (letter === "\n") return { nodes: [make("br")], end: at + 1 };
  if (letter === "\\" && /[\\`*_~[\]!<>#|(){}.+-]/.test(text[at + 1] ?? "")) return { nodes: [text[at + 1]], end: at + 2 };
  if (letter === "`") return codeSpan(text, at);
  if (letter === "[") return link(text, at, depth);
  if (letter === "!" && text[at + 1] === "[") return link(text, at + 1, depth);
  if (letter === "<") return autolink(text, at);
  if (letter === "h") return bareLink(text, at);
  for (const [mark, tag] of PAIRS) {
    if (text.startsWith(mark, at)) return emphasis(text, at, mark, tag, depth);
  }
  return null;
}

function codeSpan(text, at) {
  const mark = /^`+/.exec(text.slice(at, at + 20))[0];
  const end = text.indexOf(mark, at + mark.length);
  if (end < 0) return null;
  return { nodes: [make("code", { textContent: text.slice(at + mark.length, end).trim() })], end: end + mark.length };
}

function emphasis(text, at, mark, tag, depth) {
  const inside = at + mark.length;
  if (/\s|^$/.test(text[inside] ?? "")) return null;
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return null; // snake_case
  for (let end = text.indexOf(mark, inside + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const after = text[end + mark.length] ?? "";
    if (/\s/.test(text[end - 1]) || (mark[0] === "_" && /\w/.test(after))) continue;
    if (mark.length === 1 && (after === mark || text[end - 1] === mark)) continue; // belongs to a double mark
    return { nodes: [make(tag, {}, ...inline(text.slice(inside, end), depth + 1))], end: end + mark.length };
  }
  return null;
}

function link(text, at, depth) {
  const match = /^\[([^[\]\n]{0,300})\]\(\s*<?([^()\s<>]{1,2000}(?:\([^()\s]*\))?)>?(?:\s+"[^"\n]*")?\s*\)/.exec(text.slice(at, at + 2400));
  if (!match) return null;
  const label = match[1] ? inline(match[1], depth + 1) : [match[2]];
  const end = at + match[0].length;
  return { nodes: safeLink(match[2], label), end };
}

function autolink(text, at) {
  const match = /^<((?:https?:\/\/|mailto:)[^<>\s]{1,2000})>/.exec(text.slice(at, at + 2020));
  return match ? { nodes: safeLink(match[1], [match[1]]), end: at + match[0].length } : null;
}

function bareLink(text, at) {
  const [found] = /^https?:\/\/[^\s<>"'`]{1,2000}/.exec(text.slice(at, at + 2020)) ?? [];
  if (!found || /\w/.test(text[at - 1] ?? "")) return null;
  const url = found.replace(/[.,;:!?)\]*_]+$/, "");
  return { nodes: safeLink(url, [url]), end: at + url.length };
}

// A link to the web or to mail; any other scheme stays text.
function safeLink(url, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(url)) return label;
  return [make("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...label)];
}
