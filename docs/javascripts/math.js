// Formulas stay readable as TeX where this script cannot be loaded; nothing else depends on it.
window.MathJax = { tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] } };
