// Which pages a search finds, and in which order: in place of Sphinx's Search.query, which shows
// nothing where no page has all of the words. A page counts by the words that it has, rare ones more,
// and by its best heading, index entry or name; it is listed once, at that heading.
(() => {
  const LAST = [
    "guide/changelog", "guide/results", "guide/versions", "guide/glossary", "guide/apis",
    "guide/architecture",
  ];
  const IN_TEXT = 1;
  const IN_HEADING = 3; // and in an index entry
  const IN_NAME = 2; // of the library
  const OF_LAST = 0.4;
  const OF_SYMPTOMS = 1.15; // for who types several words: one or two are rather a subject
  const OF_ALL = 3; // a heading of more pages, such as "Known limits", tells nothing
  const LEAST = 0.3; // of the first page's score
  const MOST = 15; // pages

  const stemmer = new Stemmer();

  function wordsOf(text) {
    const found = new Set();
    for (const word of splitQuery(text.toLowerCase())) {
      if (stopwords.indexOf(word) === -1) found.add(stemmer.stemWord(word));
    }
    return found;
  }

  function listed(files) {
    if (files === undefined) return [];
    return files.length === undefined ? [files] : files;
  }

  // The pages with a word, or with longer ones that contain it where none has it.
  function pagesWith(index, word) {
    const found = new Set([...listed(index.terms[word]), ...listed(index.titleterms[word])]);
    if (found.size === 0 && word.length > 3) {
      for (const terms of [index.terms, index.titleterms]) {
        for (const [term, files] of Object.entries(terms)) {
          if (term.includes(word)) listed(files).forEach((file) => found.add(file));
        }
      }
    }
    return found;
  }

  // [page, anchor, words, weight, what is shown] of headings, index entries and names.
  function places(index) {
    const found = [];
    for (const [title, pages] of Object.entries(index.alltitles)) {
      if (pages.length > OF_ALL) continue;
      for (const [file, anchor] of pages) found.push([file, anchor, wordsOf(title), IN_HEADING, title]);
    }
    for (const [entry, pages] of Object.entries(index.indexentries)) {
      for (const [file, anchor] of pages) found.push([file, anchor, wordsOf(entry), IN_HEADING, null]);
    }
    for (const [prefix, names] of Object.entries(index.objects)) {
      for (const [file, , , anchor, name] of names) {
        const whole = prefix ? `${prefix}.${name}` : name;
        found.push([file, anchor || whole, wordsOf(name), IN_NAME, name]);
      }
    }
    return found;
  }

  function rank(index, query) {
    const asked = wordsOf(query);
    const worth = new Map();
    const scores = new Map();
    for (const word of asked) {
      const pages = pagesWith(index, word);
      worth.set(word, pages.size ? Math.log(1 + index.docnames.length / pages.size) : 0);
      for (const page of pages) {
        scores.set(page, (scores.get(page) || 0) + IN_TEXT * worth.get(word));
      }
    }
    const best = new Map();
    for (const [page, anchor, words, weight, shown] of places(index)) {
      const common = [...words].filter((word) => asked.has(word));
      const sum = common.reduce((total, word) => total + (worth.get(word) || 0), 0);
      if (sum === 0) continue;
      const share = (common.length / words.size + common.length / asked.size) / 2;
      const score = weight * sum * (0.4 + 0.6 * share);
      if (score > (best.get(page)?.score || 0)) best.set(page, { score, anchor, shown });
    }
    const results = [];
    for (const page of new Set([...scores.keys(), ...best.keys()])) {
      const name = index.docnames[page];
      const place = best.get(page);
      let score = (scores.get(page) || 0) + (place?.score || 0);
      const isEntry = place !== undefined && place.shown === null && name !== "guide/glossary";
      if (LAST.includes(name) && !isEntry) score *= OF_LAST;
      if (asked.size > 2 && name.startsWith("guide/symptoms_")) score *= OF_SYMPTOMS;
      const title = index.titles[page];
      const shown = place?.shown && place.shown !== title ? `${title} > ${place.shown}` : title;
      const anchor = place?.anchor ? `#${place.anchor}` : "";
      results.push([name, shown, anchor, null, score, index.filenames[page]]);
    }
    results.sort((one, other) => other[4] - one[4] || (one[0] < other[0] ? -1 : 1));
    return results.filter((result) => result[4] >= LEAST * results[0][4]).slice(0, MOST);
  }

  if (typeof Search === "undefined") {
    globalThis.rank = rank; // for who tries it without a page
    return;
  }
  Search.rank = (query) => rank(Search._index, query);
  Search.query = (query) => {
    const results = Search.rank(query);
    const asked = wordsOf(query);
    const highlighted = new Set(splitQuery(query.toLowerCase()));
    if (SPHINX_HIGHLIGHT_ENABLED) {
      localStorage.setItem("sphinx_highlight_terms", [...highlighted].join(" "));
    }
    _displayNextItem(results.reverse(), results.length, asked, highlighted);
  };
})();
