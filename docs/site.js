// What the theme draws after the page has loaded: buttons of code are no landmarks, and what scrolls takes the focus.
const complete = () => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) nav.setAttribute("role", "none");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    const scrolls = box.scrollWidth > box.clientWidth;
    if (scrolls && !box.hasAttribute("tabindex")) box.setAttribute("tabindex", "0");
    if (!scrolls) box.removeAttribute("tabindex");
  }
};
const changes = { childList: true, subtree: true, attributeFilter: ["tabindex"] };
new MutationObserver(complete).observe(document.body, changes);
addEventListener("resize", complete);
complete();
