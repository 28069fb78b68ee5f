"use strict";
// Nothing is drawn by script: the template has the schedules as SVG.
base.start(() => {});
