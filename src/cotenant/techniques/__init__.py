"""Published systems, one package each; each README.md says which. The base imports none of them."""
