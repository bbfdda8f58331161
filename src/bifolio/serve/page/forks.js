// The view of `/v1/branches`: texts that the engine holds, as a tree of forks, with the blocks that they share.
import { $, announce, HttpError, make, plural, request } from "./core.js";

const UNKNOWN = 404;
const TAIL = 160; // characters of a text that a row shows
const known = new Map(); // id -> {id, parent, number, tokens, blocks, text}
let count = 0;
let isBusy = false;

export function setUpForks() {
  $("forks-form").onsubmit = (event) => {
    event.preventDefault();
    const prompt = $("forks-prompt").value;
    if (prompt) run("opened", async () => add((await post("/v1/branches", { prompt })).id, null));
  };
}

// Run a verb, read all branches again and draw them.
async function run(told, work) {
  if (isBusy) return;
  isBusy = true;
  $("forks").setAttribute("aria-busy", "true");
  $("forks-problem").hidden = true;
  try {
    await work();
    announce(told);
  } catch (error) {
    $("forks-problem").textContent = error.message;
    $("forks-problem").hidden = false;
  }
  for (const branch of [...known.values()]) await refresh(branch);
  draw();
  isBusy = false;
  $("forks").setAttribute("aria-busy", "false");
}

const post = async (path, body, method) => (await request(path, { body, method })).json();
const verb = (branch, name, body) => post(`/v1/branches/${branch.id}/${name}`, body);

function add(id, parent) {
  count += 1;
  known.set(id, { id, parent, number: count, tokens: 0, blocks: [], text: "" });
}

// The branch as the engine has it; one that was closed there, or not used for its time to live, is forgotten.
async function refresh(branch) {
  try {
    const card = await (await request(`/v1/branches/${branch.id}`)).json();
    branch.tokens = card.num_tokens;
    branch.blocks = card.blocks;
    branch.text = (await post("/detokenize", { tokens: card.token_ids })).prompt;
  } catch (error) {
    if (error instanceof HttpError && error.status === UNKNOWN) forget(branch);
  }
}

function forget(branch) {
  known.delete(branch.id);
  for (const other of known.values()) if (other.parent === branch.id) other.parent = branch.parent;
}

const work = {
  Fork: (branch) => async () => {
    const made = await verb(branch, "fork", { n: Math.max(1, Number($("forks-n").value) || 1) });
    for (const each of made.data) add(each.id, branch.id);
  },
  Generate: (branch) => () => verb(branch, "generate", {
    max_tokens: Math.max(1, Number($("forks-tokens").value) || 16),
    temperature: Number($("forks-temperature").value) || 0,
    ignore_eos: true,
  }),
  Append: (branch) => () => verb(branch, "append", { prompt: $("forks-text").value }),
  Cut: (branch) => () => verb(branch, "truncate", {
    num_tokens: Math.max(1, branch.tokens - Math.max(1, Number($("forks-tokens").value) || 16)),
  }),
  Close: (branch) => async () => {
    await post(`/v1/branches/${branch.id}`, undefined, "DELETE");
    forget(branch);
  },
};

// -- drawing -------------------------------------------------------------------------------------------------------------

function draw() {
  const users = new Map(); // block -> the branches that hold it
  for (const branch of known.values()) {
    for (const block of branch.blocks) users.set(block, (users.get(block) ?? 0) + 1);
  }
  $("forks").replaceChildren(...below(null, users));
  $("no-forks").hidden = known.size > 0;
  const alone = [...known.values()].reduce((sum, branch) => sum + branch.blocks.length, 0);
  $("forks-summary").textContent = known.size
    ? `${plural(known.size, "branch").replace("branchs", "branches")} hold ${plural(users.size, "block")}; alone they would hold ${alone}`
    : "";
  $("forks").dataset.blocks = users.size;
  $("forks").dataset.alone = alone;
}

const below = (parent, users) =>
  [...known.values()].filter((branch) => branch.parent === parent).map((branch) => row(branch, users));

function row(branch, users) {
  const shared = branch.blocks.filter((block) => users.get(block) > 1).length;
  const cells = branch.blocks.map((block) => make("i", {
    className: users.get(block) > 1 ? "shared" : "own",
    title: `block ${block}, in ${plural(users.get(block), "branch").replace("branchs", "branches")}`,
  }));
  const name = `Branch ${branch.number}`;
  const buttons = Object.entries(work).map(([label, verbOf]) =>
    make("button", { type: "button", className: "small", textContent: label, "aria-label": `${label}: ${name}`,
      onclick: () => run(`${label}: ${name}`, verbOf(branch)) }));
  const text = branch.text.length > TAIL ? `…${branch.text.slice(-TAIL)}` : branch.text;
  const item = make("li", { className: "fork" },
    make("div", { className: "row" },
      make("b", { textContent: name }),
      make("span", { className: "muted small fork-facts",
        textContent: `${plural(branch.tokens, "token")} · ${plural(branch.blocks.length, "block")}, ${shared} shared` }),
      make("span", { className: "grow" }), ...buttons),
    make("p", { className: "fork-text", textContent: text }),
    make("div", { className: "fork-blocks", role: "img",
      "aria-label": `${plural(branch.blocks.length, "block")}, ${shared} shared with other branches` }, ...cells));
  const children = below(branch.id, users);
  if (children.length) item.append(make("ul", {}, ...children));
  return item;
}
