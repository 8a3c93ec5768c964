// What scrolls sideways can be reached and scrolled by keyboard, and every side bar has a name for screen readers.
document.addEventListener("DOMContentLoaded", () => {
  for (const [name, title] of [["sidebar-drawer", "All pages"], ["toc-drawer", "On this page"]]) {
    document.querySelector(`.${name}`)?.setAttribute("aria-label", title);
  }
  const regions = document.querySelectorAll(".table-wrapper, article pre");
  const mark = () => regions.forEach((region) => {
    if (region.scrollWidth > region.clientWidth) region.setAttribute("tabindex", "0");
    else region.removeAttribute("tabindex");
  });
  mark();
  window.addEventListener("resize", mark);
});
