// Everything works without this: it saves a click on the filter, moves through the heat map, and tells of newer scores.
"use strict";
(() => {
  const form = document.querySelector("form.filter");
  if (form) {
    form.addEventListener("change", (event) => {
      if (event.target.type !== "search") form.requestSubmit();
    });
    // Empty fields would only make the address long.
    form.addEventListener("submit", () => {
      for (const field of form.elements) {
        if (field.name && field.value === "") field.disabled = true;
      }
    });
    const search = form.querySelector("[data-search]");
    document.addEventListener("keydown", (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
      if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        search.focus();
        search.select();
      }
    });
  }
  window.addEventListener("pageshow", () => {
    for (const field of form?.elements ?? []) field.disabled = false;
  });

  const map = document.querySelector("[data-map]");
  map?.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up" }[event.key];
    const here = event.target.closest("a");
    if (!step || !here) return;
    const nodes = [...map.querySelectorAll("a")];
    const at = nodes.indexOf(here);
    let next = nodes[at + step];
    if (typeof step === "string") {
      const box = here.getBoundingClientRect();
      const down = step === "down";
      const others = down ? nodes.slice(at + 1) : nodes.slice(0, at).reverse();
      let line = null;
      let best = Infinity;
      next = undefined;
      for (const each of others) {
        const place = each.getBoundingClientRect();
        if (down ? place.top < box.bottom : place.bottom > box.top) continue;
        if (line !== null && Math.abs(place.top - line) > 1) break;
        line = place.top;
        const apart = Math.abs(place.left - box.left);
        if (apart < best) [best, next] = [apart, each];
      }
    }
    if (!next) return;
    event.preventDefault();
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  const newer = document.getElementById("newer");
  if (newer) {
    const look = async () => {
      if (document.hidden) return;
      try {
        const answer = await fetch("/page/decision", { headers: { Accept: "application/json" } });
        if (answer.ok && (await answer.json()).decision !== newer.dataset.decision) {
          newer.setAttribute("role", "status");
          newer.hidden = false;
        }
      } catch {
        // The service is away; the next look tells.
      }
    };
    setInterval(look, 30000);
  }
})();
