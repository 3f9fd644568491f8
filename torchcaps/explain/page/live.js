"use strict";
// The live page: what the network does with the input, drawn anew after each answer of the network.
// `element`, `props` and `watch` are Gradio's. It takes quoted words of a script for names of events, so that those of
// its own properties (inputs, every) must not be quoted in any script of the live page.

function showAnswer() {
  loaded.clear(); // pictures of inputs that are gone
  const { report, example } = props.value ?? {};
  if (!example) {
    const how = capitalized(listed(props.ways, "or"));
    element.replaceChildren(make("p", {}, `${how}, and you see here what the network does with it.`));
    return;
  }
  const snapshot = { examples: [example], masks: [example] };
  const sectionOf = ([address, heading, , content], view) => {
    const { lead, parts } = content(view);
    return make("section", { id: address }, make("h2", {}, heading), make("p", { class: "lead" }, lead), parts);
  };
  const limits = make("ul", { class: "small" }, report.limits.map((limit) => make("li", {}, limit)));
  if (report.target === "masks") {
    element.replaceChildren(sectionOf(MASKS_SECTION, { report, snapshot }), limits);
    return;
  }
  const draw = async (chosen) => {
    const image = example.image ? await whenLoaded(example.image) : null;
    if (props.value?.example !== example) return; // another answer has come meanwhile
    const view = { report, snapshot, example, image, chosen };
    const choose = (index) => { if (isShown(example, index)) draw(index); };
    const sections = EXAMPLE_SECTIONS.filter(([, , exists]) => exists(view)).map((section) => sectionOf(section, view));
    replaceContent(element, exampleParts(view, choose), sections, limits);
  };
  draw(example.predicted);
}

watch("value", showAnswer);
showAnswer();
