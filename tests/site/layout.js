// Return the defects of the page that is shown, as text. `wide`: nothing may need scrolling.
(wide) => {
  const found = [];
  const content = document.querySelector('.md-content');
  const name = (element) =>
    `<${element.localName}> "${element.textContent.trim().replace(/\s+/g, ' ').slice(0, 70)}"`;
  const scrolls = (element) => /auto|scroll/.test(getComputedStyle(element).overflowX);

  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) found.push(`the page is ${root.scrollWidth} px wide`);

  for (const element of document.querySelectorAll('.md-content *, .md-sidebar a')) {
    if (!element.clientWidth) continue;
    const inside = `${element.scrollWidth} px in ${element.clientWidth} px`;
    const fits = element.scrollWidth <= element.clientWidth + 1;
    if (!fits && scrolls(element) && wide) found.push(`${name(element)} is scrolled: ${inside}`);
    if (!fits && /hidden|clip/.test(getComputedStyle(element).overflowX)) {
      found.push(`${name(element)} is cut off: ${inside}`);
    }
  }
  const edge = content.getBoundingClientRect().right + 1;
  for (const element of content.querySelectorAll('pre, table, math, img, svg, code, p, li')) {
    if (element.getBoundingClientRect().right <= edge) continue;
    let box = element.parentElement;
    while (box !== content && !scrolls(box)) box = box.parentElement;
    if (box === content) found.push(`${name(element)} is wider than the text`);
  }

  for (const image of document.images) {
    if (!image.complete || !image.naturalWidth) found.push(`${image.src} is not shown`);
  }
  for (const formula of content.querySelectorAll('math')) {
    const { width, height } = formula.getBoundingClientRect();
    if (!width || !height) found.push(`${name(formula)} has no size`);
  }
  const prose = content.cloneNode(true);
  prose.querySelectorAll('pre, code, math, script, style').forEach((each) => each.remove());
  const latex = prose.textContent.match(/.{0,20}(\$[^$\n]+\$|\\[([]|\\[a-z]{3,}).{0,20}/);
  if (latex) found.push(`a formula is not typeset: ${latex[0]}`);

  const headings = [...content.querySelectorAll('h1, h2, h3, h4, h5, h6')];
  for (const heading of headings) {
    const next = heading.nextElementSibling;
    const ends = !next && !heading.parentElement.nextElementSibling;
    if (ends || (/^h[1-6]$/.test(next?.localName) && next.localName <= heading.localName)) {
      found.push(`the section ${name(heading)} is empty`);
    }
  }
  return found;
}
