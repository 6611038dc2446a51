"""Training of Llama models for drafting and decoding: one shared loop, one entry module a job."""
