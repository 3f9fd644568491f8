"use strict";
// The parse tree: the strongest parts of the chosen class, and of each part its own strongest parts.

function treeSection(view) {
  const { example, chosen, image } = view;
  const root = example.trees[chosen];
  const input = image && placed(root) ? outlinedCanvas(image, "The input, with an outline around the part") : null;
  const seen = make("figcaption", {});
  const mark = (part) => {
    const at = placed(part);
    input?.outline(at?.box);
    const whose = at === part ? "" : `, the strongest part of ${part.name} that has a place here`;
    seen.textContent = at ? `Outlined: ${at.name}${whose}.` : `${part.name} has no place here.`;
  };
  const top = node(root, image, mark, true, root.share || 1);
  const tree = make("ul", { class: "tree", mouseleave: () => mark(root) }, top);
  mark(root);
  const how = input
    ? "Point at a part, or move to it with the Tab key, to see where it looked; press it to see its own parts, if it "
      + "has any. Rows and columns count capsules, not pixels."
    : "Press a part to see its own parts.";
  const names = example.words
    ? " Parts between the words and the answer have numbers and no names: nobody told the network what they stand for."
    : "";
  const lead = `The network builds wholes from parts. This tree takes ${quoted(view, chosen)} apart again: under it `
    + `are the parts that gave most to it, each with its share of the whole. ${how}${names}`;
  const parts = [tree,
    make("p", { class: "small after" }, `The strongest way from the top to the bottom: ${strongest(root)}.`)];
  if (!input) return { lead, parts };
  const outlined = make("figure", { class: "stay" }, input.element, seen);
  return { lead, parts: make("div", { class: "beside tree-beside" }, outlined, make("div", {}, parts)) };
}

/** The part itself if it has a place in the input, else its strongest part that has one; null if none has. */
function placed(part) {
  return part.box ? part : (part.parts ?? []).map(placed).find(Boolean) ?? null;
}

/** The names from a part down to its strongest part of parts. */
function strongest(part) {
  const first = part.parts?.[0];
  return `${part.name} (${percent(part.share)})${first ? ` \u2190 ${strongest(first)}` : ""}`;
}

/** A part with its share and, when it is open, its parts; these are made when they are first seen. */
function node(part, image, mark, open, whole) {
  const hasParts = Boolean(part.parts?.length);
  const crop = image && part.box ? cropCanvas(image, part.box, `What ${part.name} sees`) : null;
  const show = () => mark(part);
  const button = make("button", { type: "button", class: "part", "aria-expanded": hasParts ? String(open) : null,
    mouseenter: show, focus: show }, row(crop, part.name, part.share, whole, hasParts));
  if (!hasParts) return make("li", {}, button);
  const inside = make("ul", { hidden: !open });
  const unfold = () => {
    if (inside.childElementCount) return;
    inside.append(...part.parts.map((child) => node(child, image, mark, false, whole)));
    if (part.rest > 0.0005) {
      inside.append(make("li", { class: "rest" }, row(null, "all others together", part.rest, whole, false)));
    }
  };
  if (open) unfold();
  button.addEventListener("click", () => {
    unfold();
    inside.hidden = !inside.hidden;
    button.setAttribute("aria-expanded", String(!inside.hidden));
  });
  return make("li", {}, button, inside);
}

function row(crop, name, share, whole, opens) {
  return [make("span", { class: opens ? "arrow" : "arrow none", "aria-hidden": "true" }), crop,
    make("span", { class: "name" }, name), bar(share / whole), make("span", { class: "value" }, percent(share))];
}
