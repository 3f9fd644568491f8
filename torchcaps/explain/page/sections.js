"use strict";
// The sections on one example, which the page and the live page share: address, heading, what it needs, content.

const EXAMPLE_SECTIONS = [
  ["tree", "Parse tree: what the answer is made of", (view) => view.example?.trees, treeSection],
  ["poses", "What each number of a vector means", (view) => view.example?.sliders, slidersSection],
  ["moved", "Turned, grown, moved", (view) => view.example?.transformed?.length, transformedSection],
];
