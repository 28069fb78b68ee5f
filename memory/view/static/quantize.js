"use strict";
// Nothing is drawn by script: the template has the lines as SVG.
base.start(() => {});
