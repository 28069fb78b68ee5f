"""Generation over pages: runs tokens of many sequences through a transformer whose keys and values are in a
page pool."""
