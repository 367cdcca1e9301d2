"""Tables, reports and traces for people to look at."""
