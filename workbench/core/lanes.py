"""What makes the bits of a CPU's elementwise maps depend on an element's place, as numbers."""

LANES = 64  # a flat length that is a multiple of this leaves no scalar tail in any vector width in use
SERIAL = 32_768  # elementwise maps up to this length run on one thread, so threads cannot move a tail
