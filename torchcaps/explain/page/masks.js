"use strict";
// What a network says of each pixel.

function masksSection(view) {
  const { classes, colors } = view.report;
  const maps = view.snapshot.masks.some(({ pictures }) => pictures.some(([, of]) => of.includes(": ")));
  const lead = "Each class lies over the image in its color."
    + (maps ? " A map is light where the network gives much to its class." : "");
  const legend = make("ul", { class: "colors" }, classes.map((name, k) => {
    const swatch = make("span", { class: "swatch" });
    if (colors[k]) swatch.style.background = colors[k];
    return make("li", {}, swatch, colors[k] ? name : `${name} (no color)`);
  }));
  const cards = view.snapshot.masks.map(({ title, dice, pictures }) => make("div", { class: "card wide" },
    make("h3", {}, title), dice === null ? null : make("p", { class: "value" }, `Dice ${number(dice)}`),
    make("div", { class: pictures.length > 3 ? "pictures many" : "pictures" },
      pictures.map(([source, of]) => figure(picture(source, `${title}: ${of}`), of)))));
  return { lead, parts: [legend, make("div", { class: "cards" }, cards)] };
}

/** As those of EXAMPLE_SECTIONS: address, heading, whether there is something to show, content. */
const MASKS_SECTION = ["masks", "What it says of each pixel", (view) => view.snapshot.masks, masksSection];
