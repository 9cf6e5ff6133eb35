// The Kubernetes provider of Pulumi as an executable. Its own main package cannot be built from the module cache
// (generated files are written beside it); this one embeds the same generated files, which tools/binaries.py takes from
// the module at build time.
package main

import (
	_ "embed"

	"github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/provider"
)

//go:embed schema-embed.json
var schema []byte

//go:embed terraform-mapping-embed.json
var mapping []byte

// The SDK's version: the engine compares the two.
var version = "4.34.2"

func main() {
	provider.Serve("kubernetes", version, schema, mapping)
}
