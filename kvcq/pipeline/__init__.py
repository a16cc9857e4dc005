"""One function a verb: request in, result out."""
