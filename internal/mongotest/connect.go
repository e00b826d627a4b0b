package mongotest

import (
	"context"
	"fmt"
	"os"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// uriVariable names a server to use instead of starting one.
const uriVariable = "MONGODB_URI"

// Connect gives a program, such as an example, a client: for the server that the environment
// variable MONGODB_URI names if it is set, else for a one-node replica set that is started
// here. stop disconnects it and ends what was started; call it once done. progress, if
// given, is told what takes long, such as "starting mongod"; nothing is printed.
func Connect(ctx context.Context, progress ...func(string)) (client *mongo.Client, stop func(), err error) {
	return connectTo(ctx, os.Getenv(uriVariable), progress)
}

// connectTo is Connect for the server behind uri, or a new one if uri is empty.
func connectTo(ctx context.Context, uri string, progress []func(string)) (*mongo.Client, func(), error) {
	tell := func(what string) {
		for _, p := range progress {
			if p != nil {
				p(what)
			}
		}
	}
	end := func() {}
	if uri != "" {
		if _, err := kindOf(ctx, uri); err != nil {
			return nil, nil, fmt.Errorf("mongotest: %w", err)
		}
	} else {
		server, err := Start(ctx, Options{ReplicaSet: 1, Progress: tell})
		if err != nil {
			return nil, nil, err
		}
		uri, end = server.URI(), server.Stop
	}
	client, err := mongo.Connect(options.Client().ApplyURI(uri))
	if err != nil {
		end()
		return nil, nil, fmt.Errorf("mongotest: %w", err)
	}
	return client, func() { disconnect(client); end() }, nil
}
