"""The keys of the trainer's configs that memory/remat/ilp.py writes a plan with; a test compares them with the base."""

REMAT_LAYERS = "remat.layers"
REMAT_OFFLOAD = "remat.offload"
REMAT_POLICY = "remat.policy"
REMAT_SAVE = "remat.save"
