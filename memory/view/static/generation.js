"use strict";
// The template contains the drawings as SVG, so the script draws nothing.
base.start(() => {});
