// Completes what the theme draws after the page has loaded: code's buttons are no landmarks, wide tables take the focus.
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
const complete = () => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) nav.setAttribute("role", "none");
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) sizes.observe(box);
};
new MutationObserver(complete).observe(document.body, { childList: true, subtree: true });
complete();
