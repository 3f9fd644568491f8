"use strict";
// Texts: the words, shaded by their shares in the chosen class, and the strongest of them in a table.

const MOST_WORDS = 10; // in the table

function wordsOf(view) {
  const { example, chosen } = view;
  const name = quoted(view, chosen);
  const shares = example.word_shares[chosen];
  const ratios = shares.map((share, index) => share / Math.max(example.word_even[index], 1e-12));
  const times = (index) => ratios[index].toFixed(1);
  const said = make("output", { class: "said" },
    "Point at a word, or move to it with the arrow keys, to read its share.");
  const tell = (index) => {
    said.textContent = `\u201c${example.words[index]}\u201d gave ${percent(shares[index])} of ${name}: ${times(index)} `
      + "times an even share.";
  };
  const rows = largest(ratios, MOST_WORDS).map((index) => [example.words[index], percent(shares[index]),
    `${times(index)}\u00d7`]);
  return make("div", { class: "block" }, make("h3", {}, `Which words ${name} comes from`),
    make("p", {},
      `The stronger a word is shaded and underlined, the more of ${name} came from it than an even share. Words with `
        + "an even share or less are not shaded. Where hardly any word is, the answer came from all of them alike. "
        + "Long words have several parts, and their even share is larger. What the shares lack to 100\u00a0% belongs "
        + "to marks that the encoder adds at the beginning and the end."),
    shadedWords(example.words, shares, ratios, tell), said,
    table(`The words that gave most to ${name}, beyond their even share`, ["word", "share", "times an even share"],
      rows, "numbers"));
}

/** Words as buttons; `tell` gets the place of the one that is pointed at or has the focus. */
function shadedWords(words, shares, ratios, tell) {
  const most = Math.max(...ratios, 2); // the scale reaches twice an even share at least: nearly even words look even
  const buttons = words.map((word, index) => {
    const show = () => tell(index);
    const button = make("button", { type: "button", class: "word", "data-key": `word-${index}`,
      "aria-label": `${word}: ${percent(shares[index])}`, mouseenter: show, focus: show, click: show }, word);
    button.style.setProperty("--share", Math.max(0, ratios[index] - 1) / (most - 1));
    return button;
  });
  arrowKeys(buttons, 0, tell);
  return make("div", { class: "words", role: "group", "aria-label": "The text, word by word" }, buttons);
}
