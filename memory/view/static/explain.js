"use strict";
// The page of an explanation draws nothing; its tables are sorted by the shared script.
base.start(() => {});
