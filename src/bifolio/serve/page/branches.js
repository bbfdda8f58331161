// The conversation as a tree: every message on every branch. Rows are indented where branches part.
import { $, make } from "./core.js";
import { state } from "./state.js";
import { childrenOf, pathTo, titleOf } from "./store.js";

let open = () => {};

export function setUpBranches(handler) {
  open = handler;
  $("branches").addEventListener("keydown", move);
}

export function drawBranches() {
  const { conversation } = state;
  const tree = $("branches");
  const path = new Set(pathTo(conversation, conversation.leaf).map((node) => node.id));
  tree.replaceChildren(...rows(conversation, childrenOf(conversation, null), path, 1));
  const current = tree.querySelector("[aria-selected=true]") ?? tree.querySelector("[role=treeitem]");
  if (current) current.tabIndex = 0;
  tree.hidden = !conversation.nodes.length;
  $("no-branches").hidden = isForked(conversation);
}

const isForked = (conversation) =>
  [null, ...conversation.nodes.map((node) => node.id)].some((id) => childrenOf(conversation, id).length > 1);

// Messages in a line are rows of one level; where several follow one message, they stand in a group below it.
function rows(conversation, heads, path, level) {
  const items = [];
  for (let siblings = heads; siblings.length;) {
    const made = siblings.map((node) => row(conversation, node, path, level));
    if (siblings.length > 1) {
      siblings.forEach((node, index) => {
        const below = rows(conversation, childrenOf(conversation, node.id), path, level + 1);
        if (below.length) made[index].append(make("ul", { role: "group" }, ...below));
      });
      items.push(...made);
      break;
    }
    items.push(...made);
    siblings = childrenOf(conversation, siblings[0].id);
    if (siblings.length > 1) {
      made[0].append(make("ul", { role: "group" }, ...rows(conversation, siblings, path, level + 1)));
      break;
    }
  }
  return items;
}

function row(conversation, node, path, level) {
  const who = node.role === "user" ? "you" : node.variant === undefined ? "model" : "AB"[node.variant];
  const label = make("span", { className: `branch ${node.role}${path.has(node.id) ? " on" : ""}` },
                     make("b", { textContent: who }), make("span", { textContent: titleOf(node.text) || "…" }));
  label.onclick = () => open(node);
  const item = make("li", { role: "treeitem", "aria-level": level, tabIndex: -1,
                            "aria-selected": String(node.id === conversation.leaf) }, label);
  item.dataset.node = node.id;
  return item;
}

function move(event) {
  const items = [...$("branches").querySelectorAll("[role=treeitem]")];
  const at = items.indexOf(document.activeElement);
  const target = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if ((event.key === "Enter" || event.key === " ") && at >= 0) {
    event.preventDefault();
    const { node } = items[at].dataset;
    open(state.conversation.nodes.find((each) => each.id === node));
    $("branches").querySelector("[tabindex='0']")?.focus();
  } else if (items[target]) {
    event.preventDefault();
    for (const item of items) item.tabIndex = -1;
    items[target].tabIndex = 0;
    items[target].focus();
  }
}
