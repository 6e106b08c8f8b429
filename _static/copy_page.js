// "Copy page" copies the page's Markdown twin, which lies next to it.
"use strict";

(() => {
  for (const button of document.querySelectorAll("button.copy-page")) {
    const words = button.textContent;
    const say = (said) => {
      button.textContent = said;
      setTimeout(() => { button.textContent = words; }, 2000);
    };
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        const twin = await fetch(button.dataset.twin);
        if (!twin.ok) throw new Error(twin.statusText);
        await navigator.clipboard.writeText(await twin.text());
        say("Copied");
      } catch {
        say("Not copied");
      }
    });
  }
  // The sidebar shows the page that is read, after the theme has scrolled it to its section.
  window.addEventListener("load", () => {
    const here = document.querySelector(".bd-sidebar-primary a[aria-current='page']");
    const sidebar = here?.closest(".bd-sidebar-primary");
    if (!sidebar) return;
    const box = here.getBoundingClientRect();
    const frame = sidebar.getBoundingClientRect();
    if (box.top < frame.top || box.bottom > frame.bottom) {
      sidebar.scrollTop += box.top - frame.top - sidebar.clientHeight / 2;
    }
  });
})();
