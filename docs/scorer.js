// Scores of search results: Sphinx's own, and more for a page whose title has all words of the query, for the pages that
// explain the words of the field, and for pages that are read before those of the API. Without this, pages of equal
// scores come in the order of the alphabet.
const FIRST = ["start", "concepts", "not-learning", "choosing"];
var Scorer = {
  score: ([page, title, , , score]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = query.toLowerCase().split(/\W+/).filter((word) => word);
    const named = words.length && words.every((word) => title.toLowerCase().includes(word));
    return score + (named ? 10 : 0) + (FIRST.includes(page) ? 9 : 0) + (page.startsWith("api/") ? 0 : 3);
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
