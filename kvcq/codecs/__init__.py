"""Head vectors to codes and back in plain torch: the definition of correct."""
