"""The APIs of the server: types of requests and answers, and handlers over one kind of call."""
