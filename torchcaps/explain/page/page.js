"use strict";
// What is chosen (checkpoint, example, class), the bar with these choices, and the sections, drawn anew after a choice.

const report = JSON.parse(document.getElementById("report").textContent);
const state = { snapshot: report.snapshots.length - 1, example: 0, chosen: null }; // a null class: the predicted one
let drawings = 0;

/** The sections in their order: address, heading, whether there is something to show, content. */
const SECTIONS = [
  ["results", "Results", (view) => hasResults(report, view.snapshot), (view) => resultsSection(report, view.snapshot)],
  MASKS_SECTION,
  ["example", "An example", (view) => view.example, (view) => exampleSection(view, chooseExample, chooseClass)],
  ...EXAMPLE_SECTIONS,
  ["overlaps", "Two at once", (view) => view.snapshot.overlaps.length, overlapsSection],
  ["routing", "How routing makes up its mind", (view) => view.snapshot.sharpening.length, sharpeningSection],
  ["honest", "Is there really something to see?", (view) => view.snapshot.controls.length || report.limits.length,
    honestSection],
  ["figures", "Figures in files", () => report.figures.length, () => figuresSection(report)],
];

async function currentView() {
  const snapshot = report.snapshots[state.snapshot];
  const example = snapshot.examples[Math.min(state.example, snapshot.examples.length - 1)];
  const image = example?.image ? await whenLoaded(example.image) : null;
  const chosen = state.chosen !== null && isShown(example, state.chosen) ? state.chosen : example?.predicted ?? null;
  return { report, snapshot, example, image, chosen };
}

/** Draw all that depends on the choices; if another choice was made meanwhile, that one draws. */
async function draw() {
  drawings += 1;
  const own = drawings;
  const view = await currentView();
  if (own !== drawings) return;
  replaceContent(document.getElementById("answer"), answer(view));
  showChoices(view);
  const shown = SECTIONS.filter(([, , exists]) => exists(view));
  for (const [address, heading, exists, content] of SECTIONS) {
    const section = sectionAt(address, heading);
    section.hidden = !exists(view);
    if (section.hidden) continue;
    const { lead, parts } = content(view);
    replaceContent(section.querySelector(".content"), make("p", { class: "lead" }, lead), parts);
  }
  const links = shown.map(([address, heading]) => make("li", {}, make("a", { href: `#${address}` }, heading)));
  replaceContent(document.getElementById("contents"), make("ol", {}, links));
  document.documentElement.dataset.drawn = String(own);
}

function sectionAt(address, heading) {
  const there = document.getElementById(address);
  if (there) return there;
  const section = make("section", { id: address, "aria-labelledby": `${address}-heading` },
    make("h2", { id: `${address}-heading` }, heading), make("div", { class: "content" }));
  document.getElementById("content").append(section);
  return section;
}

/** The short answer at the top of the page. */
function answer(view) {
  const { accuracy, tested, label, dice } = view.snapshot;
  if ((dice ?? null) !== null) {
    return make("p", { class: "answer" }, make("strong", {}, `A mean Dice coefficient of ${number(dice)}`),
      ` on ${plural(tested, "test image")}. 1 is perfect.`);
  }
  const how = report.target === "labels" ? "exactly right" : "right";
  const right = accuracy === null ? [] : [make("strong", {}, `${percent(accuracy)} ${how}`),
    ` on ${plural(tested, "test input")}${label ? `, ${label}` : ""}.`, balancedOf(view.snapshot)];
  const one = view.example ? ` ${verdict(view).replace("The network says", "On the example below it says")}` : "";
  return make("p", { class: "answer" }, right, one);
}

/** The bar: checkpoint, example and class. It is made once, so that a slider in it keeps the focus. */
function makeBar() {
  const holder = document.getElementById("bar");
  if (report.snapshots.length > 1) {
    holder.append(slider({ label: "Weights", count: report.snapshots.length, start: state.snapshot,
      words: (index) => report.snapshots[index].label, key: "snapshot",
      changed: (index) => { state.snapshot = index; draw(); } }).element);
  }
  if (report.snapshots.every((snapshot) => !snapshot.examples.length)) {
    holder.hidden = report.snapshots.length < 2;
    return;
  }
  const options = report.classes.map((name, index) => make("option", { value: index }, name));
  const select = make("select", { id: "class", change: () => chooseClass(Number(select.value)) }, options);
  holder.prepend(make("a", { class: "now", href: "#example" }));
  holder.append(make("label", { class: "choice" }, `${capitalized(termOf({ report }))} `, select));
}

function showChoices(view) {
  const now = document.querySelector("#bar .now");
  if (!now || !view.example) return;
  const small = view.image ? picture(view.example.image, "") : null;
  now.replaceChildren(...[small, make("span", {}, view.example.title)].filter(Boolean));
  now.setAttribute("aria-label", `The example: ${view.example.title}; choose another`);
  const select = document.getElementById("class");
  for (const option of select.options) option.disabled = !isShown(view.example, Number(option.value));
  select.value = view.chosen;
}

function chooseExample(index) {
  state.example = index;
  state.chosen = null;
  draw();
}

function chooseClass(index) {
  if (!isShown(report.snapshots[state.snapshot].examples[state.example], index)) return;
  state.chosen = index;
  draw();
}

if (report.target !== "masks") document.getElementById("how").append(howToRead(report));
makeBar();
draw();
