// A beam search as a tree that grows: beams that go on, beams that ended, and beams that were dropped.
import { make } from "./core.js";
import { joined } from "./tokens.js";

// Nodes of the tree: {token, id, parent, children, state: "running" | "ended" | "dropped" | "kept" | "best", score}
export class BeamTree {
  constructor() {
    this.root = { token: "", id: null, parent: null, children: [], state: "running", score: null };
    this.steps = [[this.root]]; // running beams after each step
  }

  // One step: {position, beams: [{parent, token, token_id, score, finished}]}. A repeated step replaces itself.
  take(step) {
    const before = this.steps[step.position];
    if (!before) return;
    for (const parent of new Set(before)) parent.children = [];
    const running = [];
    for (const beam of step.beams) {
      const parent = before[beam.parent] ?? before[0]; // the first step: all groups begin at the prompt
      const node = { token: beam.token, id: beam.token_id, parent, children: [], score: beam.score,
                     state: beam.finished ? "ended" : "running" };
      parent.children.push(node);
      if (!beam.finished) running.push(node);
    }
    this.steps.length = step.position + 1;
    this.steps.push(running);
    this.settle(new Set(running));
  }

  // A node stays green while a running or ended beam goes through it.
  settle(running) {
    const visit = (node) => {
      if (!node.children.length) {
        if (node.state === "running" && !running.has(node)) node.state = "dropped";
        return node.state !== "dropped";
      }
      const lives = node.children.map(visit).some(Boolean);
      node.state = lives ? "running" : "dropped";
      return lives;
    };
    visit(this.root);
  }

  // The end: returned token ids, best first, decide which beams were kept.
  finish(returned) {
    const clear = (node) => {
      node.state = "dropped";
      node.children.forEach(clear);
    };
    clear(this.root);
    [...returned].reverse().forEach((ids, index) => {
      const state = index === returned.length - 1 ? "best" : "kept";
      let node = this.root;
      node.state = state;
      for (const id of ids) {
        node = node.children.find((child) => child.id === id);
        if (!node) return;
        node.state = state;
      }
    });
  }
}

const WORDS = { running: "running", ended: "ended", dropped: "dropped", kept: "kept", best: "best beam" };

// Chains without branches are one row.
export function drawBeams(target, tree) {
  const branch = (start) => {
    let node = start;
    const texts = [node.token];
    while (node.children.length === 1 && node.children[0].state === node.state) {
      [node] = node.children;
      texts.push(node.token);
    }
    const row = make("div", { className: `segment ${start.state}` },
                     make("span", { className: "sr-only", textContent: `${WORDS[start.state]}: ` }),
                     make("span", { className: "words", textContent: joined(texts) || "prompt" }));
    if (!node.children.length && node.score !== null) {
      row.append(make("b", { className: "score", textContent: node.score.toFixed(2), title: "summed log probability" }));
    }
    const item = make("li", {}, row);
    if (node.children.length) item.append(make("ul", {}, ...node.children.map(branch)));
    return item;
  };
  target.replaceChildren(make("ul", { className: "tree" }, branch(tree.root)));
}
