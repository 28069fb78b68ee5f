"use strict";
// The page of a document draws nothing; its tables are sorted by the shared script.
base.start(() => {});
