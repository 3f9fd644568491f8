// Scores of search results: Sphinx's own, and more for a page whose title has all words of the query. Without this,
// pages of equal scores come in the order of the alphabet.
var Scorer = {
  score: ([, title, , , score]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = query.toLowerCase().split(/\W+/).filter((word) => word);
    return words.length && words.every((word) => title.toLowerCase().includes(word)) ? score + 10 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
