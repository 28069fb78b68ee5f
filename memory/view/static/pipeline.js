"use strict";
// The template contains the schedules as SVG, so the script draws nothing.
base.start(() => {});
