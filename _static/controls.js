// Toggle a line: on a recipe's page, each edit under "What breaks" gets a switch. It strikes the line
// in the code above and shows the failure that was recorded beside it. Without scripts the page has both.
"use strict";

function toggles() {
  const code = [...document.querySelectorAll("article div.highlight-Python pre, article div.highlight-python pre")];
  for (const control of document.querySelectorAll(".recipe-control")) {
    const diff = control.querySelector(".highlight-diff pre");
    const removed = diff ? diff.textContent.split("\n").filter((line) => line.startsWith("-")).map((line) => line.slice(1)) : [];
    const block = code.find((pre) => removed.length && pre.textContent.includes(removed.join("\n")));
    if (!block) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "toggle-line";
    button.textContent = "Show it in the code";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => show(control, block, removed));
    (control.querySelector("summary") ?? control.querySelector(".control-says"))?.after(button);
  }
}

const TALL = 120; // lines of a block of code of which the first are shown
const FIRST = 80;

function shorten() {
  for (const pre of document.querySelectorAll("article div.highlight-Python pre")) {
    const lines = pre.textContent.trimEnd().split("\n").length;
    if (lines <= TALL || pre.closest("details") || !document.querySelector(".recipe-header")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "toggle-line";
    button.textContent = `Show all ${lines} lines`;
    pre.style.maxHeight = `${(FIRST * pre.getBoundingClientRect().height) / lines}px`;
    pre.style.overflowY = "hidden";
    button.addEventListener("click", () => lengthen(pre, button));
    pre.closest('div[class*="highlight-"]').after(button);
  }
}

function lengthen(pre, button) {
  pre.style.maxHeight = "";
  button.remove();
}

function show(control, block, removed) {
  document.querySelector(".toggled")?.remove();
  const added = control.querySelector(".highlight-diff pre").textContent.split("\n")
    .filter((line) => line.startsWith("+")).map((line) => line.slice(1));
  const [before, after] = block.textContent.split(removed.join("\n"), 2);
  const lines = (text, from, to) => text.split("\n").slice(from, to).join("\n");
  const panel = document.createElement("figure");
  panel.className = "toggled";
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // it may scroll
  const part = (tag, text) => {
    const element = document.createElement(tag);
    element.textContent = text;
    pre.append(element);
  };
  part("span", `${lines(before, -6, undefined)}`);
  part("del", removed.join("\n"));
  if (added.length) part("ins", `\n${added.join("\n")}`);
  part("span", lines(after, 0, 5));
  const failure = document.createElement("figcaption");
  const recorded = control.querySelector(".failure");
  failure.append(recorded ? recorded.cloneNode(true) : "Not executed for this page.");
  for (const copy of failure.querySelectorAll("button, [id]")) {
    if (copy.tagName === "BUTTON") copy.remove();
    else copy.removeAttribute("id");
  }
  const back = document.createElement("button");
  back.type = "button";
  back.className = "toggle-line";
  back.textContent = "Put the line back";
  const pressed = control.querySelector(".toggle-line");
  back.addEventListener("click", () => {
    panel.remove();
    pressed.setAttribute("aria-pressed", "false");
    pressed.focus();
  });
  pressed.setAttribute("aria-pressed", "true");
  panel.append(pre, failure, back);
  block.closest("details")?.setAttribute("open", "");
  block.closest('div[class*="highlight-"]').after(panel);
  back.focus({ preventScroll: true });
  panel.scrollIntoView({ block: "center" });
}

// What ranks print scrolls in its box: by keyboard, too.
for (const pre of document.querySelectorAll(".sphx-glr-script-out pre")) pre.tabIndex = 0;
toggles();
shorten();
