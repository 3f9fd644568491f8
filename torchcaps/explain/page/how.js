"use strict";
// How to read the page: three words and a drawing.

function howToRead(report) {
  const things = { images: "an edge, a corner, a whole object", texts: "a word, a phrase, a judgment",
    arrays: "an edge, a beat, a whole organ" }[report.inputs];
  const terms = [
    ["Capsule",
      `A few numbers, a vector, that stand for a part or a whole: ${things}. Its length or score says whether the `
        + "thing is there; its numbers say how it looks."],
    ["Coefficients",
      "Parts vote for the wholes that they may belong to. The coefficients, thick and thin lines in the drawing, say "
        + "how much of a part\u2019s vote goes to each of them. Routing finds them."],
    ["Share",
      "How much of an answer\u2019s vector came from a part. In every layer the shares of an answer make 100\u00a0%: "
        + "nothing is lost on the way from the answer back to the input."],
  ];
  const list = make("dl", { class: "terms" },
    terms.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
  return make("section", { class: "how", "aria-labelledby": "how-heading" },
    make("h2", { id: "how-heading" }, "How to read this page"), make("div", { class: "how-grid" }, list, howDrawing()));
}

/** Four parts, two wholes, and lines as thick as the coefficients between them. */
function howDrawing() {
  const parts = [26, 64, 102, 140];
  const wholes = [52, 120];
  const toFirst = [0.9, 0.75, 0.6, 0.1];
  const name = "Four parts on the left, two wholes on the right. Lines as thick as the coefficients join them: most go "
    + "to the answer.";
  const svg = makeSvg("svg", { viewBox: "0 0 300 176", role: "img", "aria-label": name, class: "drawing" },
    makeSvg("title", {}, name));
  const line = (from, to, coefficient, kind) => makeSvg("line", { x1: 66, y1: parts[from], x2: 206, y2: wholes[to],
    "stroke-width": 0.8 + 9 * coefficient, class: kind });
  toFirst.forEach((coefficient, place) => {
    svg.append(line(place, 1, 1 - coefficient, "weak"), line(place, 0, coefficient, "strong"));
  });
  parts.forEach((height) => svg.append(makeSvg("circle", { cx: 62, cy: height, r: 9, class: "dot" })));
  wholes.forEach((height, place) => {
    svg.append(makeSvg("circle", { cx: 212, cy: height, r: 17, class: place ? "dot" : "dot answer-dot" }));
  });
  const text = (x, y, anchor, written) => makeSvg("text", { x, y, "text-anchor": anchor }, written);
  svg.append(text(62, 170, "middle", "parts"), text(137, 170, "middle", "coefficients"),
    text(212, 170, "middle", "wholes"), text(236, wholes[0] + 4, "start", "answer"),
    text(236, wholes[1] + 4, "start", "another"));
  return svg;
}
