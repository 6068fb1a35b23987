// What a page lacks for keyboard and screen reader: names, labels, captions, scopes, headings, landmarks. Empty: nothing.
() => {
  const problems = [];
  const name = (e) => (e.getAttribute("aria-label") || e.innerText || e.title || "").trim();
  const all = (selector) => [...document.querySelectorAll(selector)];
  const ids = all("[id]").map((e) => e.id);
  if (new Set(ids).size !== ids.length) problems.push("an id comes twice");
  for (const e of all("a[href], button")) {
    if (!name(e)) problems.push(`no name: ${e.outerHTML.slice(0, 90)}`);
  }
  for (const e of all("input:not([type=hidden]), select")) {
    if (!e.labels?.length && !e.getAttribute("aria-label")) problems.push(`no label: ${e.name}`);
  }
  for (const e of all("table")) {
    if (!e.caption?.textContent.trim()) problems.push("a table without a caption");
  }
  for (const e of all("thead th, tbody th")) {
    if (!e.scope) problems.push(`no scope: ${e.textContent}`);
  }
  for (const e of all("body svg")) {
    const hidden = e.getAttribute("aria-hidden") === "true";
    if (!hidden && !(e.getAttribute("role") === "img" && name(e))) problems.push("a plot without words");
  }
  for (const attribute of ["aria-labelledby", "aria-describedby"]) {
    for (const e of all(`[${attribute}]`)) {
      for (const id of e.getAttribute(attribute).split(/\s+/)) {
        if (!document.getElementById(id)) problems.push(`refers to ${id}, which is not there`);
      }
    }
  }
  for (const e of all(".scroll, pre")) {
    if (e.tabIndex !== 0) problems.push("scrolls, and no key reaches it");
  }
  const levels = all("h1, h2, h3").map((e) => Number(e.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1 || levels[0] !== 1) problems.push(`headings ${levels}`);
  levels.forEach((level, at) => {
    if (at && level > levels[at - 1] + 1) problems.push(`a heading of level ${level} after ${levels[at - 1]}`);
  });
  for (const landmark of ["header", "main", "footer"]) {
    if (all(`body > ${landmark}`).length !== 1) problems.push(`landmark ${landmark}`);
  }
  const root = document.documentElement;
  if (!root.lang || !document.title) problems.push("no language or title");
  if (root.scrollWidth > root.clientWidth) problems.push("the page itself scrolls sideways");
  return problems;
}
