"""One short file a method: statistics to plan, transforms and codecs."""
