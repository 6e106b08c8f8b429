// Measured timelines: two buttons that draw one larger, to be scrolled. Without scripts it is a picture.
"use strict";

for (const downloads of document.querySelectorAll("ul.timeline-downloads")) {
  const figure = downloads.parentElement.querySelector("figure.lanes");
  const picture = figure?.querySelector(".lanes-picture");
  if (!picture || figure.querySelector(".zoom")) continue;
  const buttons = document.createElement("p");
  buttons.className = "zoom";
  let scale = 1;
  for (const [words, factor] of [["Larger", 2], ["Smaller", 0.5]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "toggle-line";
    button.textContent = words;
    button.addEventListener("click", () => {
      const middle = (picture.scrollLeft + picture.clientWidth / 2) / picture.scrollWidth;
      scale = Math.min(16, Math.max(1, scale * factor));
      for (const svg of picture.querySelectorAll("svg")) {
        svg.dataset.width ??= svg.getBoundingClientRect().width;
        svg.style.maxWidth = scale === 1 ? "" : "none";
        svg.style.width = scale === 1 ? "" : `${svg.dataset.width * scale}px`;
      }
      picture.scrollLeft = middle * picture.scrollWidth - picture.clientWidth / 2;
    });
    buttons.append(button, " ");
  }
  picture.tabIndex = 0;
  picture.setAttribute("role", "region");
  picture.setAttribute("aria-label", "Timeline, scrolls when it is larger");
  figure.prepend(buttons);
}
