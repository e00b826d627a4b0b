package mongotest

import (
	"net"
	"sync"
)

// A link carries messages between one connection of the driver and the server, one by
// one, so that it knows where a command ends and which reply is its.
type link struct {
	lossy          *Lossy
	client, server net.Conn

	mu      sync.Mutex
	awaited map[int32]*fate // by request id: commands at the server that have a fate
	ended   bool            // no more replies will come
}

// up carries requests.
func (k *link) up() {
	defer k.client.Close()
	for {
		m, err := readMessage(k.client)
		if err != nil {
			break // the driver has closed the connection
		}
		f := k.lossy.next(m)
		if f != nil {
			switch f.kind {
			case loseRequest:
				k.server.Close()
				return
			case holdRequest:
				close(f.held.reached)
				<-f.held.released
			}
			k.await(m.requestID(), f)
		}
		if _, err := k.server.Write(m); err != nil {
			k.server.Close() // no reply will come
			break
		}
	}
	// A server may drop the command of a client that went away. What has a fate is to be
	// run all the same.
	for _, f := range k.outstanding() {
		<-f.answered
	}
	k.server.Close()
}

// down carries replies.
func (k *link) down() {
	defer k.client.Close()
	defer k.server.Close()
	defer k.end()
	for {
		m, err := readMessage(k.server)
		if err != nil {
			return
		}
		if f := k.arrived(m.responseTo()); f != nil {
			close(f.answered)
			switch f.kind {
			case loseReply:
				return
			case holdReply:
				close(f.held.reached)
				<-f.held.released
			}
		}
		if _, err := k.client.Write(m); err != nil {
			return
		}
	}
}

// await notes that the reply to a request has a fate.
func (k *link) await(id int32, f *fate) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended {
		close(f.answered)
		return
	}
	k.awaited[id] = f
}

// arrived takes the fate of the reply to a request, or nil.
func (k *link) arrived(id int32) *fate {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.awaited[id]
	delete(k.awaited, id)
	return f
}

func (k *link) outstanding() []*fate {
	k.mu.Lock()
	defer k.mu.Unlock()
	var fs []*fate
	for _, f := range k.awaited {
		fs = append(fs, f)
	}
	return fs
}

// end lets nobody wait for replies that will not come.
func (k *link) end() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = true
	for id, f := range k.awaited {
		close(f.answered)
		delete(k.awaited, id)
	}
}
