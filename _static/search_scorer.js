// Sphinx's weights of what a search finds, and one of ours: of pages that match equally well, the
// symptoms come first for who types several words. One or two words are rather a subject.
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const words = new URLSearchParams(window.location.search).get("q") || "";
    const several = words.trim().split(/\s+/).length > 2;
    return several && page.startsWith("guide/symptoms_") ? score + 1 : score;
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
