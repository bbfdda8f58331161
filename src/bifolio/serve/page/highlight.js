// Colours for code: comments, strings, numbers and keywords, by one regular expression for each family of languages.
import { make } from "./core.js";

const STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const NUMBERS = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORDS = String.raw`[A-Za-z_$][\w$]*`;
const FAMILIES = {
  hash: family(String.raw`#[^\n]*`, String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|` + STRINGS),
  slash: family(String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, `${STRINGS}|` + "`(?:[^`\\\\]|\\\\[\\s\\S])*`?"),
  dash: family(String.raw`--[^\n]*`, STRINGS),
};
const LANGUAGES = {
  hash: "python py sh bash shell zsh console ruby rb yaml yml toml ini make makefile dockerfile r perl",
  slash: "js javascript ts typescript jsx tsx json c cpp c++ h hpp cs csharp java kotlin go rust rs swift scala php css",
  dash: "sql lua haskell hs",
};
const KEYWORDS = new Set((
  "and as assert async await break case catch class const continue def default del delete do elif else enum except " +
  "export extends false False final finally fn for from func function global if impl implements import in instanceof " +
  "interface is lambda let loop match mod module mut new nil None nonlocal not null of or package pass private " +
  "protected pub public raise return self static struct super switch this throw trait true True try type typeof " +
  "union use using var void while with yield select from where insert update into values create table join on group " +
  "order by limit SELECT FROM WHERE INSERT UPDATE INTO VALUES CREATE TABLE JOIN ON GROUP ORDER BY LIMIT AND OR NOT " +
  "int float double char bool long short unsigned string str then fi done echo end local").split(" "));
const familyOf = new Map();
for (const [name, languages] of Object.entries(LANGUAGES)) {
  for (const language of languages.split(" ")) familyOf.set(language, FAMILIES[name]);
}

function family(comments, strings) {
  return new RegExp(`(${comments})|(${strings})|(${NUMBERS})|(${WORDS})`, "g");
}

// Nodes for the code; plain text where the language is not known.
export function highlighted(code, language) {
  const pattern = familyOf.get(language.toLowerCase());
  if (!pattern || code.length > 20000) return [code];
  const nodes = [];
  let end = 0;
  for (const match of code.matchAll(pattern)) {
    const [text, comment, string, number, word] = match;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : KEYWORDS.has(word) ? "keyword" : "";
    if (!kind) continue;
    nodes.push(code.slice(end, match.index), make("span", { className: `code-${kind}`, textContent: text }));
    end = match.index + text.length;
  }
  nodes.push(code.slice(end));
  return nodes;
}
